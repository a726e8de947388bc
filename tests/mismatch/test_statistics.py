"""Statistics and report against plain Python."""

import math

import pytest
import torch

from quads_common.mismatch import (
    FilterOptions,
    gap_report,
    select_sequences,
    sequence_statistics,
)
from quads_common.mismatch.plot import plot_gaps
from tests.mismatch.batches import drifted_batch


def tokens_of(delta, mask):
    """The gaps of each sequence as Python floats."""
    return [
        [float(d) for d, m in zip(row, keep, strict=True) if m]
        for row, keep in zip(delta, mask, strict=True)
    ]


def plain_k3(d):
    d = max(-20.0, min(20.0, d))
    return math.exp(d) - 1 - d


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_sequence_statistics(dtype, mask_dtype):
    delta = torch.tensor([[0.1, -3.0, 2.5, 9.0], [0.5, -0.5, 0.0, 7.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]])
    delta = delta.to(dtype)
    found = sequence_statistics(delta, mask.to(mask_dtype))
    expected = tokens_of(delta, mask)
    assert found.length.tolist() == [3, 2, 0]
    assert found.tail_tokens.tolist() == [2, 0, 0]
    assert found.tail_share.tolist() == [2 / 3, 0, 0]
    for i, row in enumerate(expected):
        assert float(found.max_abs[i]) == max(map(abs, row), default=0.0)
        mean = sum(map(plain_k3, row)) / max(len(row), 1)
        # float64 against math.exp: a few units in the last place of terms of size exp(3)
        assert float(found.mean_k3[i]) == pytest.approx(mean, rel=1e-12, abs=1e-15)


def test_tiny_gaps_do_not_cancel():
    """exp(d) - 1 - d of 1e-7 is 5e-15: the difference of exp would return noise."""
    delta = torch.full((1, 4), 1e-7, dtype=torch.float64)
    found = sequence_statistics(delta, torch.ones(1, 4))
    assert float(found.mean_k3) == pytest.approx(5e-15, rel=0.05)


def test_infinite_gaps_count_and_missing_ones_do_not():
    delta = torch.tensor([[math.inf, 0.0], [-math.inf, 0.0], [math.nan, 3.0]])
    found = sequence_statistics(delta, torch.ones(3, 2))
    assert found.max_abs.tolist() == [math.inf, math.inf, 3.0]
    assert found.mean_k3.isfinite().all()
    assert found.unscored.tolist() == [0, 0, 1]
    assert found.length.tolist() == [2, 2, 1]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_empty_batches(shape):
    found = sequence_statistics(torch.zeros(shape), torch.ones(shape))
    assert found.length.tolist() == [0] * shape[0]
    assert gap_report(torch.zeros(shape), torch.ones(shape)).ess_token == 1.0


def test_bad_shapes_are_named():
    with pytest.raises(ValueError, match=r"\[2, 3\] and \[2, 4\]"):
        sequence_statistics(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises(ValueError, match="tail_nats"):
        sequence_statistics(torch.zeros(2, 3), torch.zeros(2, 3), tail_nats=0)
    for bad in (0.5, math.nan, 2.0):
        with pytest.raises(ValueError, match="mask must hold 0 and 1 only"):
            sequence_statistics(torch.zeros(2, 3), torch.full((2, 3), bad))
    with pytest.raises(ValueError, match="must be real"):
        sequence_statistics(torch.zeros(2, 3, dtype=torch.complex64), torch.ones(2, 3))


def test_gap_report():
    batch = drifted_batch(200, 4)
    report = gap_report(batch.delta, batch.mask)
    rows = tokens_of(batch.delta.double(), batch.mask)
    gaps = sorted(abs(d) for row in rows for d in row)
    assert (report.sequences, report.tokens) == (200, len(gaps))
    assert report.mean == pytest.approx(sum(gaps) / len(gaps), rel=1e-12)
    assert report.p99 == gaps[math.ceil(0.99 * len(gaps)) - 1]
    assert report.p999 == gaps[math.ceil(0.999 * len(gaps)) - 1]
    assert report.max == gaps[-1]
    k3s = [plain_k3(d) for row in rows for d in row]
    assert report.k3 == pytest.approx(sum(k3s) / len(k3s), rel=1e-12)
    weights = [math.exp(d) for row in rows for d in row]
    ess = sum(weights) ** 2 / sum(w * w for w in weights) / len(weights)
    assert report.ess_token == pytest.approx(ess, rel=1e-12)
    tail = sorted((sum(abs(d) > 2 for d in row) for row in rows), reverse=True)
    assert report.tail_share == pytest.approx(sum(tail) / len(gaps), rel=1e-12)
    assert report.tail_in_worst_1pct == pytest.approx(sum(tail[:2]) / sum(tail), rel=1e-12)
    least = next(n for n in range(201) if sum(tail[:n]) >= sum(tail) / 2)
    assert report.tail_half_in == least / 200
    # FourSight's claim holds by construction here: 4 strong sequences have all of the tail.
    assert sum(tail[:4]) == sum(tail) > 0


def test_effective_sample_size_of_long_drifted_sequences():
    """Sums of 40 and 60 nats: one sequence has nearly all the weight. exp of 60 is a float64."""
    for sign in (1, -1):
        delta = torch.full((10, 200), sign * 0.2, dtype=torch.float64)
        delta[0] = sign * 0.3
        weights = [math.exp(sum(row)) for row in delta.tolist()]
        expected = sum(weights) ** 2 / sum(w * w for w in weights) / 10
        found = gap_report(delta, torch.ones_like(delta)).ess_sequence
        # Sums of 200 terms of size .3 round to some 1e-14 of 60 nats.
        assert found == pytest.approx(expected, rel=1e-10)
        assert found == pytest.approx(0.1 if sign > 0 else 0.9, rel=1e-6)


def test_effective_sample_size_with_infinite_gaps():
    delta = torch.zeros(4, 3)
    delta[0, 0] = math.inf
    report = gap_report(delta, torch.ones_like(delta))
    assert (report.ess_sequence, report.ess_token) == (1 / 4, 1 / 12)
    delta[0, 0] = -math.inf
    report = gap_report(delta, torch.ones_like(delta))
    assert (report.ess_sequence, report.ess_token) == (3 / 4, 11 / 12)
    delta[0, 1] = math.inf  # and -Inf in the same sequence
    assert gap_report(delta, torch.ones_like(delta)).ess_sequence == 3 / 4
    assert gap_report(delta.fill_(-math.inf), torch.ones_like(delta)).ess_sequence == 0.0


def test_batches_without_log_probs_do_not_look_perfect(caplog):
    delta, mask = torch.zeros(10, 20), torch.ones(10, 20)
    delta[0, :2] = math.nan
    gap_report(delta, mask)
    select_sequences(sequence_statistics(delta, mask), FilterOptions())
    assert not caplog.text
    delta[0, 2] = torch.tensor(-math.inf) - torch.tensor(-math.inf)
    gap_report(delta, mask)
    assert "3 of 200 response tokens have no log-prob gap" in caplog.text
    caplog.clear()
    select_sequences(sequence_statistics(delta, mask), FilterOptions())
    assert "3 of 200 response tokens have no log-prob gap" in caplog.text
    delta.fill_(math.nan)
    with pytest.raises(ValueError, match="none of 200 response tokens"):
        gap_report(delta, mask)
    with pytest.raises(ValueError, match="none of 200 response tokens"):
        select_sequences(sequence_statistics(delta, mask), FilterOptions())


def test_no_mismatch():
    report = gap_report(torch.zeros(4, 8), torch.ones(4, 8))
    assert (report.max, report.k3, report.tail_half_in) == (0.0, 0.0, 0.0)
    assert report.ess_token == report.ess_sequence == 1.0
    assert set(report.to_metrics("x/")) == {
        f"x/{line.split()[0]}" for line in report.to_text().splitlines()
    }


def test_plot(tmp_path):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    batch = drifted_batch(100, 3)
    clean = drifted_batch(100, 0)
    runs = {"nvfp4": (batch.delta, batch.mask), "bf16": (clean.delta, clean.mask)}
    plot_gaps(runs, tmp_path / "gaps.png")
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="'empty' has no scored token"):
        plot_gaps({"empty": (torch.zeros(2, 3), torch.zeros(2, 3))}, tmp_path / "no.png")
