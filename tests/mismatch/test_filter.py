"""The filter finds the drifted sequences, no others, and never drops more than its cap."""

import dataclasses
import json
import math

import pytest
import torch

from quads_common.mismatch import (
    FilterOptions,
    RunningCap,
    calibrate,
    filter_metrics,
    load_options,
    save_options,
    select_sequences,
    sequence_statistics,
)
from tests.mismatch.batches import drifted_batch


def decide(batch, options=None, **kwargs):
    statistics = sequence_statistics(batch.delta, batch.mask)
    return statistics, select_sequences(statistics, options or FilterOptions(), **kwargs)


def dropped(result):
    return (~result.keep).nonzero().flatten().tolist()


@pytest.mark.parametrize("seed", range(5))
def test_recall_and_precision(seed):
    """Medium and strong drift: recall 1, precision 1. Weak drift, below the limit: not touched."""
    batch = drifted_batch(500, 20, seed=seed)
    _, result = decide(batch)
    found = dropped(result)
    assert found == sorted(batch.drifted["medium"] + batch.drifted["strong"])
    assert not result.capped


@pytest.mark.parametrize("share", [0.0, 0.05, 0.1, 0.1 + 1e-12, 1.0])
def test_the_cap_holds_and_takes_the_worst_first(share):
    batch = drifted_batch(100, 15)
    _, result = decide(batch, FilterOptions(max_drop_share=share))
    found, allowed = dropped(result), math.floor(share * 100)
    assert len(found) == min(allowed, 30)
    assert result.capped == (0 < allowed < 30)
    assert int(result.qualified.sum()) == 30
    kept_qualified = result.qualified & result.keep
    if found and kept_qualified.any():
        assert result.severity[~result.keep].min() >= result.severity[kept_qualified].max()


@pytest.mark.parametrize("sequences", range(2, 10))
def test_a_small_batch_drops_one_and_raises_no_alarm(sequences):
    delta = torch.zeros(sequences, 10)
    delta[1] = 1.0
    statistics = sequence_statistics(delta, torch.ones_like(delta))
    result = select_sequences(statistics, FilterOptions())
    assert dropped(result) == [1] and not result.capped
    statistics = sequence_statistics(torch.ones_like(delta), torch.ones_like(delta))
    result = select_sequences(statistics, FilterOptions())
    assert dropped(result) == [0] and result.capped
    measured = select_sequences(statistics, FilterOptions(max_drop_share=0))
    assert not dropped(measured) and measured.qualified.all() and not measured.capped


def test_the_only_sequence_of_a_batch_is_kept():
    statistics = sequence_statistics(torch.ones(1, 10), torch.ones(1, 10))
    result = select_sequences(statistics, FilterOptions())
    assert not dropped(result) and result.capped


def test_a_running_cap_counts_over_small_batches():
    cap, options, total = RunningCap(0.1), FilterOptions(), 0
    for seed in range(40):
        batch = drifted_batch(4, 1, seed=seed)
        _, result = decide(batch, options, cap=cap)
        total += len(dropped(result))
        assert total <= 1 + 0.1 * 4 * (seed + 1)
    assert total == 17 and (cap.seen, cap.dropped) == (160, 17)


def test_a_running_cap_holds_after_a_long_healthy_run():
    """The rollout that drifts as a whole: 256 sequences in micro-batches of four."""
    cap, options = RunningCap(0.1, window=128), FilterOptions()
    healthy = sequence_statistics(torch.zeros(4, 10), torch.ones(4, 10))
    drifted = sequence_statistics(torch.ones(4, 10), torch.ones(4, 10))
    for _ in range(2000):
        assert not dropped(select_sequences(healthy, options, cap=cap))
    results = [select_sequences(drifted, options, cap=cap) for _ in range(64)]
    assert sum(len(dropped(result)) for result in results) == math.floor(0.1 * (128 + 256))
    # The first three micro-batches go whole; then the credit is spent, and every one alarms.
    assert [result.capped for result in results] == [False] * 3 + [True] * 61


@pytest.mark.parametrize("bad", [{"max_drop_share": -3}, {"max_drop_share": 0.1, "window": 0}])
def test_bad_running_caps_are_named(bad):
    with pytest.raises(ValueError, match=next(reversed(bad))):
        RunningCap(**bad)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([3.0] + [0.0] * 999, False),  # one tail token alone never counts (k3 is .016 / ... below)
        ([-3.0, -3.0] + [0.0] * 298, True),  # two of 300: .67 % of tail tokens
        ([-3.0, -3.0] + [0.0] * 498, False),  # two of 500: .4 %
        ([-12.5] + [0.0] * 1999, True),  # one gap above max_abs
        ([0.15] * 100, True),  # k3 .0118
        ([0.13] * 100, False),  # k3 .0088
    ],
    ids=["one-tail", "two-of-300", "two-of-500", "max", "k3", "below-k3"],
)
def test_each_criterion(gaps, expected):
    # k3 of 3.0 is 16.1: spread over 1000 tokens .0161 would count, so that case lifts the limit.
    options = FilterOptions(max_drop_share=1.0, k3=0.02 if gaps[0] == 3.0 else 0.01)
    if gaps[0] == -3.0:  # k3 of -3.0 is 2.05, of two in 300 .0137
        options = dataclasses.replace(options, k3=0.02)
    delta = torch.tensor([gaps])
    statistics = sequence_statistics(delta, torch.ones_like(delta))
    assert bool(select_sequences(statistics, options).qualified) is expected


def test_length_does_not_matter():
    """The same gaps, repeated ten times over, are no worse."""
    delta = torch.randn(1, 200) * 0.1
    long = delta.repeat(1, 10)
    short_result = select_sequences(
        sequence_statistics(delta, torch.ones_like(delta)), FilterOptions()
    )
    long_result = select_sequences(
        sequence_statistics(long, torch.ones_like(long)), FilterOptions()
    )
    assert torch.allclose(short_result.severity, long_result.severity, rtol=1e-12)


@pytest.mark.parametrize("shape", [(0, 7), (20, 0)])
def test_empty_batches(shape):
    statistics = sequence_statistics(torch.zeros(shape), torch.ones(shape))
    result = select_sequences(statistics, FilterOptions())
    assert result.keep.tolist() == [True] * shape[0] and not result.capped
    metrics = filter_metrics(result, statistics, signal=torch.zeros(shape[0]))
    assert set(metrics.values()) == {0.0}


def test_all_masked_sequences_are_kept_and_do_not_widen_the_cap():
    batch = drifted_batch(40, 5)
    mask = torch.cat([batch.mask, torch.zeros_like(batch.mask)])
    delta = torch.cat([batch.delta, batch.delta])
    statistics = sequence_statistics(delta, mask)
    result = select_sequences(statistics, FilterOptions())
    assert result.keep[40:].all() and len(dropped(result)) == 4


def test_infinite_gaps_go_first():
    delta = torch.zeros(20, 10)
    delta[3] = 5.0
    delta[11, 0] = math.inf
    statistics = sequence_statistics(delta, torch.ones(20, 10))
    assert dropped(select_sequences(statistics, FilterOptions(max_drop_share=0.05))) == [11]


def test_equal_severity_drops_the_earlier():
    delta = torch.zeros(20, 10)
    delta[[4, 9, 15]] = 1.0
    statistics = sequence_statistics(delta, torch.ones(20, 10))
    assert dropped(select_sequences(statistics, FilterOptions())) == [4, 9]


def test_rests_of_groups_go_within_the_cap():
    """Groups of two lose one each: the partners follow as far as the cap reaches."""
    delta = torch.zeros(40, 10)
    delta[[0, 2]] = 1.0
    groups = torch.arange(40) // 2
    statistics = sequence_statistics(delta, torch.ones(40, 10))
    options = FilterOptions()
    assert dropped(select_sequences(statistics, options, groups=groups)) == [0, 1, 2, 3]
    three = dataclasses.replace(options, max_drop_share=0.075)
    assert dropped(select_sequences(statistics, three, groups=groups)) == [0, 1, 2]
    none = dataclasses.replace(options, min_group_kept=0)
    assert dropped(select_sequences(statistics, none, groups=groups)) == [0, 2]
    # A group of one that lost nothing stays.
    alone = torch.arange(40)
    alone[1] = 0
    assert dropped(select_sequences(statistics, options, groups=alone)) == [0, 1, 2]
    with pytest.raises(ValueError, match=r"groups must be \[40\]"):
        select_sequences(statistics, options, groups=groups[:3])
    with pytest.raises(ValueError, match=r"groups must be \[40\]"):
        select_sequences(statistics, none, groups=groups[:3])


def test_metrics_by_sign_and_length():
    batch = drifted_batch(200, 8)
    statistics, result = decide(batch)
    signal = torch.ones(200)
    signal[batch.drifted["strong"]] = -1.0
    metrics = filter_metrics(result, statistics, signal=signal)
    assert metrics["tim/drop_rate"] == 16 / 200
    assert metrics["tim/drop_rate_negative"] == 1.0
    assert metrics["tim/drop_rate_positive"] == 8 / 192
    assert metrics["tim/drop_rate_zero"] == 0.0
    # What FourSight promises: a few sequences hold the tail. Here all of it, by construction.
    assert metrics["tim/tail_removed"] == 1.0
    middle = statistics.length.median()
    long = (statistics.length > middle) & ~result.keep
    assert metrics["tim/drop_rate_long"] == float(
        long.sum() / (statistics.length > middle).sum().double()
    )
    with pytest.raises(ValueError, match=r"signal must be \[200\]"):
        filter_metrics(result, statistics, signal=signal[:5])


def test_calibration_lets_the_reference_pass(tmp_path):
    reference = drifted_batch(1000, 0)
    statistics = sequence_statistics(reference.delta * 5, reference.mask)
    options = calibrate(statistics)
    assert (statistics.mean_k3 > options.k3).sum() == 5
    assert options.k3 == sorted(statistics.mean_k3.tolist())[994]
    assert options.max_abs == 12.0 and options.tail_share == 0.005
    save_options(options, tmp_path / "tim.json")
    assert load_options(tmp_path / "tim.json") == options


def test_a_reference_without_much_gap_does_not_make_everything_qualify():
    statistics = sequence_statistics(torch.randn(400, 50) * 1e-3, torch.ones(400, 50))
    assert calibrate(statistics).k3 == 0.001
    assert 0 < calibrate(statistics, k3_floor=0.0).k3 < 1e-5


def test_calibration_raises_the_other_limits_where_the_reference_passes_them():
    delta = torch.full((400, 50), 13.0)
    options = calibrate(sequence_statistics(delta, torch.ones_like(delta)))
    assert options.max_abs == 13.0 and options.tail_share == 1.0


def test_calibration_refuses_what_tells_nothing():
    delta = torch.randn(199, 50) * 0.01
    with pytest.raises(ValueError, match=r"199 sequences; .* at least 200"):
        calibrate(sequence_statistics(delta, torch.ones_like(delta)))
    with pytest.raises(ValueError, match="no log-prob gap"):
        calibrate(sequence_statistics(torch.zeros(200, 5), torch.ones(200, 5)))
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(sequence_statistics(delta, torch.ones_like(delta)), share=1.0)
    delta = torch.randn(200, 50) * 0.01
    for floor in (math.nan, -1.0, math.inf):
        with pytest.raises(ValueError, match="k3_floor must be a number of at least 0"):
            calibrate(sequence_statistics(delta, torch.ones_like(delta)), k3_floor=floor)
    delta[:2, 0] = math.inf
    with pytest.raises(ValueError, match=r"more than 0\.50% .* infinite log-prob gap"):
        calibrate(sequence_statistics(delta, torch.ones_like(delta)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "must hold a JSON object"),
        ('{"k4": 1}', "unknown option 'k4'; allowed are"),
        ('{"k3": 0}', "k3 must be a positive number, got 0"),
        ('{"k3": NaN}', "k3 must be a positive number, got nan"),
        ('{"max_drop_share": 1.5}', r"max_drop_share must lie in \[0, 1\], got 1.5"),
        ('{"tail_tokens": 1.5}', "tail_tokens must be an integer"),
        ('{"contract_version": 99}', "contract version 99"),
    ],
)
def test_bad_files_are_named(tmp_path, content, message):
    path = tmp_path / "tim.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_options(path)
    assert "tim.json" in str(error.value)


@pytest.mark.parametrize("raw", [[], None, "k3", {1: 1, "a": 2}])
def test_what_is_no_mapping_of_options_is_named(raw):
    with pytest.raises(ValueError, match="here: "):
        FilterOptions.from_dict(raw, "here")


def test_options_survive_json():
    options = FilterOptions(k3=0.02, max_drop_share=0.25)
    again = FilterOptions.from_dict(json.loads(json.dumps(options.to_dict())), "here")
    assert again == options
