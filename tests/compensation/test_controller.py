"""Boundaries, BF16 columns and files of a rank's ``Compensator``, without an engine."""

import logging

import pytest
import torch

from quads_common.compensation import new_site_state
from quads_common.compensation.controller import Compensator
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.site import linear_site, moe_sites
from quads_common.weight_units import Piece
from tests.common.samples import normal
from tests.compensation.serving import (
    EXPERTS,
    PLANTED,
    W2,
    W13,
    K,
    N,
    bf16,
    channels,
    feed,
    options,
    rows_with,
    stored,
)

CPU = torch.device("cpu")


@pytest.fixture
def log():
    return logging.getLogger("test")


def loaded(log, chosen, **more) -> Compensator:
    """A rank with two sites whose first load is over."""
    compensator = Compensator(chosen, tp_size=1, log=log, **more)
    for site in (W13, W2):
        state = compensator.add(site, CPU)
        compensator.add_columns(state, EXPERTS, N)
    compensator.weights_arrive()
    compensator.end_sync()
    compensator.loaded()
    return compensator


def serve(compensator, chosen, seed=1) -> None:
    """Enough rows for w13 and for every expert, with planted channels."""
    first, second = compensator.states
    feed(first, rows_with(PLANTED, 64, seed), chosen)
    for expert in range(EXPERTS):
        feed(second, rows_with(PLANTED, 64, seed + expert), chosen, expert)


@pytest.mark.parametrize("dummy", [True, False])
def test_statistics_are_empty_after_a_load_of_dummy_weights(log, dummy):
    """An engine that makes up weights writes random values into every tensor of a layer."""
    compensator = Compensator(options(), tp_size=1, log=log)
    state = compensator.add(W2, CPU)
    floats = {n: t for n, t in state.buffers().items() if t.is_floating_point() and t.numel()}
    for tensor in floats.values():
        tensor.fill_(1e-3)
    if not dummy:
        compensator.weights_arrive()
        compensator.end_sync()
    compensator.loaded()
    empty = [name for name, tensor in floats.items() if not tensor.any()]
    assert empty == (list(floats) if dummy else [])


NONE = [[[-1] * 16], [[-1] * 16] * EXPERTS]
ALL_PLANTED = [[PLANTED], [PLANTED] * EXPERTS]


def test_a_sync_is_one_boundary(log):
    """However many calls end it; loads alone and calls alone are none."""
    chosen = options()
    compensator = loaded(log, chosen)
    assert (compensator.version, compensator.boundaries) == (0, 0)
    serve(compensator, chosen)
    assert not compensator.end_sync()
    compensator.weights_arrive()
    compensator.weights_arrive()
    assert channels(compensator) == NONE
    assert compensator.end_sync()
    assert not compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert (compensator.version, compensator.boundaries) == (1, 1)


def test_refresh_interval_counts_syncs(log):
    chosen = options(refresh_interval=2)
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    for version in (0, 1, 1):
        compensator.weights_arrive()
        compensator.end_sync()
        assert compensator.version == version


def test_state_tells_versions_and_shared_lists(log):
    chosen = options()
    compensator = loaded(log, chosen)
    first = compensator.state().copy()
    assert (first["start_version"], first["version"]) == (0, 0)
    assert list(first["shared"]) == [W13.name]
    assert first["calibration_passes"] == 2
    serve(compensator, chosen)
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"]) == (True, True)
    second = compensator.state()
    assert (second["start_version"], second["version"]) == (0, 1)
    assert first["shared"] != second["shared"]


def test_a_refresh_that_ends_a_sync_is_one(log):
    """Its metrics are those of the rows that were counted, and handed on once."""
    chosen, handed = options(), []
    compensator = loaded(log, chosen, on_refresh=handed.append)
    serve(compensator, chosen)
    compensator.weights_arrive()
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"], len(handed)) == (True, True, 1)
    for site in result["metrics"]:
        assert site["residual_energy_before"] > 0 and site["refreshes"] == 1
        assert site["channels_overlap"] == 0, "of the lists before the sync"
    compensator.weights_arrive()
    compensator.end_sync()
    assert compensator.boundaries == 2


def test_a_refresh_that_ends_a_sync_that_is_not_due(log):
    chosen = options(refresh_interval=3)
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.weights_arrive()
    assert compensator.refresh_now()["changed"]
    assert channels(compensator) == ALL_PLANTED


def test_energies_stay_known_where_no_row_was_counted(log):
    chosen, handed = options(), []
    compensator = loaded(log, chosen, on_refresh=handed.append)
    serve(compensator, chosen)
    first, second = (compensator.refresh_now()["metrics"] for _ in range(2))
    for before, after in zip(first, second, strict=True):
        assert before["residual_energy_after"] > 0 and after["refreshes"] == 2
        for key in ("residual_energy_before", "residual_energy_after", "signal_energy"):
            assert after[key] == before[key]
        assert after["rac_scale_underflow_share"] == before["rac_scale_underflow_share"]
        assert after["channels_overlap"] == 1
    assert handed[1] == compensator.metrics


@pytest.mark.parametrize(
    "chosen", [options(rac_ratio=0.0), options(splice_count_w2=0, compensate=("w2",))]
)
def test_one_pass_where_one_method_is_used(log, chosen):
    assert loaded(log, chosen).state()["calibration_passes"] == 1


@pytest.mark.parametrize("kind", ["w13", "w2"])
def test_inputs_that_are_not_compensated_are_not_kept_counted_or_reported(log, tmp_path, kind):
    chosen = options(compensate=(kind,))
    compensator, layer = Compensator(chosen, tp_size=1, log=log), torch.nn.Module()
    runtime = Runtime(compensator, chosen, period=1, max_tokens=8)
    given = {
        site.kind: LayerInput(
            layer, site, runtime, units=1, rows=N, dtype=torch.bfloat16, device=CPU
        )
        for site in (W13, W2)
    }
    compensator.loaded()
    for name, one in given.items():
        active = name == kind
        assert (one.sample_map(layer, 4) is not None) == active
        assert bool(one.staged(layer)[0].numel()) == active
    result = compensator.refresh_now()
    assert [m["name"] for m in result["metrics"]] == [given[kind].state.site.name]
    path = str(tmp_path / "s")
    assert compensator.save(path, lambda parts: [parts]) == {"path": path, "inputs": 1}


def test_forget_keeps_the_lists(log):
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    compensator.forget()
    assert channels(compensator) == ALL_PLANTED
    compensator.refresh_now()
    assert channels(compensator) == NONE, "there is nothing to choose by any more"


def test_save_and_load(log, tmp_path):
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    path = str(tmp_path / "selection")
    assert compensator.save(path, lambda parts: [parts]) == {"path": path, "inputs": 2}
    assert compensator.save(path, lambda parts: None) is None
    other = loaded(log, chosen)
    assert other.load(path) == {"applied": True}
    assert channels(other) == ALL_PLANTED
    assert other.version == 1
    started = loaded(log, chosen, selection_file=path)
    assert channels(started) == ALL_PLANTED
    assert (started.state()["start_version"], started.version) == (1, 1)


# BF16 columns -----------------------------------------------------------------------------------


def send(compensator, units, seed: int, experts=range(EXPERTS)) -> torch.Tensor:
    """A sync's tensors for both sites, part by part; returns the weights [E, N, K]."""
    weights = normal(EXPERTS, N, K, seed=seed, dtype=torch.float32).to(torch.bfloat16)
    for columns in compensator._columns.values():
        for part, start in (("b", N // 2), ("a", 0)):
            for e in experts:
                compensator.weights_arrive()
                half = weights[e, start : start + N // 2]
                columns.load(units, e, part, half, f"{e}.{part}", Piece(N // 2, start))
    return weights


def assert_columns(compensator, weights) -> None:
    for columns in compensator._columns.values():
        lists = columns.state.selection.channels
        for e in range(EXPERTS):
            hot = lists[e if len(lists) > 1 else 0]
            expected = torch.where(hot >= 0, weights[e][:, hot.clamp(min=0)], 0)
            assert torch.equal(columns.columns[e], expected)


def test_lists_and_columns_change_together_when_the_sync_ends(log):
    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    addresses = [c.columns.data_ptr() for c in compensator._columns.values()]
    weights = send(compensator, units, 1)
    assert channels(compensator) == NONE
    assert_columns(compensator, weights)
    assert compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert_columns(compensator, weights)
    weights = send(compensator, units, 2)
    assert_columns(compensator, weights)
    assert not compensator.end_sync()
    assert_columns(compensator, weights)
    assert addresses == [c.columns.data_ptr() for c in compensator._columns.values()]


def test_missing_units_keep_the_lists(log, caplog):
    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    send(compensator, units, 1, experts=range(EXPERTS - 1))
    compensator.end_sync()
    assert channels(compensator) == NONE
    assert "2 inputs keep their hot channels" in caplog.text
    send(compensator, units, 2)
    compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED, "the averages were lost"


def test_a_refresh_waits_for_the_next_sync(log):
    chosen, units = bf16(refresh_interval=100), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"], len(result["metrics"])) == (False, False, 2)
    assert channels(compensator) == NONE
    weights = send(compensator, units, 1)
    assert compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert_columns(compensator, weights)


def test_a_refresh_that_ends_a_sync_puts_its_lists_in_force(log):
    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    weights = send(compensator, units, 1)
    result = compensator.refresh_now()
    assert (result["applied"], result["changed"]) == (True, True)
    assert result["metrics"][0]["residual_energy_before"] > 0
    assert channels(compensator) == ALL_PLANTED and compensator._chosen is None
    assert_columns(compensator, weights)


def blocks_under(channels: torch.Tensor, x: torch.Tensor, chosen) -> list[int]:
    """What RAC should choose where these channels are hot."""
    state = new_site_state(W13, chosen)
    state.selection.channels.copy_(channels)
    feed(state, x, chosen)
    order = state.statistics.served_energy[0].argsort(descending=True)
    return sorted(order[: K // 32].tolist())


@pytest.mark.parametrize("refreshes", [0, 2])
def test_bf16_columns_and_rac_rank_blocks_by_rows_of_the_lists_in_force(log, refreshes):
    """Rows are counted before, while and after lists wait; calibrate, sync, calibrate, sync."""
    chosen, units = options(splice_weight="bf16", splice_count_w2=0), stored()
    compensator = loaded(log, chosen)
    first = compensator.states[0]
    hot = sorted(c for b in range(4) for c in range(32 * b, 32 * b + 4))  # of blocks 0, 2, 4, 6
    quiet = [c for b in range(4) for c in range(32 * b + 16, 32 * b + 32)]

    def rows(seed):
        x = normal(64, K, seed=seed, dtype=torch.float32)
        x[:, hot] *= 60
        x[:, quiet] *= 4  # what is left once the hot ones are out
        return x.to(torch.bfloat16)

    feed(first, rows(1), chosen)
    for seed in range(refreshes):
        compensator.refresh_now()
        feed(first, rows(10 + seed), chosen)
        assert not first.averages.uncovered.any(), "the lists in force are those of the rows"
    send(compensator, units, 1)
    feed(first, rows(2), chosen)  # while the sync is going on, under the old lists
    assert compensator.end_sync()
    assert first.selection.channels[0].tolist() == hot
    assert not first.statistics.served_energy.any()
    assert first.averages.uncovered.tolist() == first.statistics.count.tolist()
    feed(first, rows(3), chosen)
    send(compensator, units, 2)
    compensator.end_sync()
    assert first.selection.channels[0].tolist() == hot
    found = first.selection.blocks[0, : K // 32].tolist()
    assert found == blocks_under(first.selection.channels, rows(3), chosen) == [1, 3, 5, 7]


def test_waiting_lists_are_saved_without_energies_of_others(log, tmp_path):
    chosen = options(splice_weight="bf16", refresh_interval=100)
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    serve(compensator, chosen, 5)
    path = str(tmp_path / "selection")
    energies = [s.statistics.served_energy.clone() for s in compensator.states]
    compensator.save(path, lambda parts: [parts])
    for state, energy in zip(compensator.states, energies, strict=True):
        assert torch.equal(state.statistics.served_energy, energy) and energy.all()
        assert not state.averages.uncovered.any()
    other = loaded(log, chosen)
    other.load(path)
    for state in other.states:
        assert not state.statistics.served_energy.any()
        assert state.averages.uncovered.tolist() == state.statistics.count.tolist() != [0]


def test_one_pass_where_hot_channels_wait_for_a_sync(log):
    chosen = options(splice_weight="bf16")
    assert loaded(log, chosen).state()["calibration_passes"] == 1


def test_waiting_lists_are_what_is_saved_and_a_file_waits_too(log, tmp_path):
    chosen, units = bf16(refresh_interval=100), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    path = str(tmp_path / "selection")
    compensator.save(path, lambda parts: [parts])
    assert channels(compensator) == NONE
    other = loaded(log, chosen)
    assert other.load(path) == {"applied": False}
    assert channels(other) == NONE
    weights = send(other, units, 1)
    other.end_sync()
    assert channels(other) == ALL_PLANTED
    assert_columns(other, weights)


def test_a_unit_with_nan_keeps_its_columns(log):
    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    weights = send(compensator, units, 1)
    compensator.end_sync()
    columns = compensator._columns[W13.name]
    bad = torch.full((N, K), float("nan"), dtype=torch.bfloat16)
    columns.load(units, 0, "a", bad[: N // 2], "0.a", Piece(N // 2))
    with pytest.raises(ValueError, match="NaN or Inf"):
        columns.load(units, 0, "b", bad[N // 2 :], "0.b", Piece(N // 2, N // 2))
    assert_columns(compensator, weights)


def full_disk(metrics):
    raise OSError(28, "No space left on device")


def test_metrics_that_nobody_takes_stop_no_refresh(log, caplog):
    """The lists have changed, and whoever caches results hears of it."""
    chosen = options()
    compensator = loaded(log, chosen, on_refresh=full_disk)
    serve(compensator, chosen)
    assert compensator.refresh_now()["changed"]
    assert channels(compensator) == ALL_PLANTED
    assert compensator.state()["version"] == 1
    assert "No space left on device" in caplog.text


def test_a_change_is_noted_before_metrics_are_handed_on(log):
    chosen = options()
    versions = []
    compensator = loaded(log, chosen, on_refresh=lambda m: versions.append(compensator.version))
    serve(compensator, chosen)
    compensator.refresh_now()
    assert versions == [1]


@pytest.mark.parametrize("step", ["refresh", "restore"])
def test_what_fails_leaves_lists_and_columns_as_they_are(log, monkeypatch, tmp_path, step):
    """After the new lists were written: those in force belong to the columns."""
    from quads_common.compensation import controller

    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    path = str(tmp_path / "selection")
    compensator.refresh_now()
    compensator.save(path, lambda parts: [parts])
    compensator._chosen = None
    original = getattr(controller, step)

    def failing(*args, **kwargs):
        original(*args, **kwargs)
        assert channels(compensator) == ALL_PLANTED
        raise RuntimeError("in the middle")

    monkeypatch.setattr(controller, step, failing)
    with pytest.raises(RuntimeError, match="in the middle"):
        compensator.refresh_now() if step == "refresh" else compensator.load(path)
    assert channels(compensator) == NONE and compensator._chosen is None
    monkeypatch.undo()
    weights = send(compensator, units, 1)
    compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert_columns(compensator, weights)


# Sites ------------------------------------------------------------------------------------------


def test_sites_of_experts():
    first, second = moe_sites(
        "m", hidden=64, inner=32, tp_size=2, tp_rank=1, experts=[4, 5], num_experts=8
    )
    assert (first.name, first.width, first.shards, first.groups) == ("m.w13", 64, 1, (0,))
    assert (second.name, second.full_width, second.offset) == ("m.w2", 64, 32)
    assert (second.groups, second.num_groups) == ((4, 5), 8)


def test_sites_of_linears():
    assert linear_site("a", width=64, full_width=64, tp_rank=1).offset == 0
    assert linear_site("a", width=32, full_width=64, tp_rank=1).offset == 32
