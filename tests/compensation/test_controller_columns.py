"""BF16 columns of a rank's ``Compensator``: lists and columns change together, with a sync."""

import pytest
import torch

from quads_common.compensation import new_site_state
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import Piece
from tests.common.samples import normal
from tests.compensation.serving import (
    ALL_PLANTED,
    EXPERTS,
    NONE,
    W13,
    K,
    N,
    bf16,
    channels,
    feed,
    loaded,
    options,
    serve,
    stored,
)


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


def assert_columns(compensator, weights, layout: TileLayout | None = None) -> None:
    for columns in compensator._columns.values():
        lists = columns.state.selection.channels
        for e in range(EXPERTS):
            hot = lists[e if len(lists) > 1 else 0]
            expected = torch.where(hot >= 0, weights[e][:, hot.clamp(min=0)], 0)
            stored = columns.columns[e]
            if layout is not None:
                stored = layout.untile_columns(stored)
            assert torch.equal(stored, expected)


@pytest.mark.parametrize("layout", [None, TileLayout(gate_up=False)], ids=str)
def test_lists_and_columns_change_together_when_the_sync_ends(log, layout):
    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen, layout)
    serve(compensator, chosen)
    addresses = [c.columns.data_ptr() for c in compensator._columns.values()]
    weights = send(compensator, units, 1)
    assert channels(compensator) == NONE
    assert_columns(compensator, weights, layout)
    assert compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert_columns(compensator, weights, layout)
    weights = send(compensator, units, 2)
    assert_columns(compensator, weights, layout)
    assert not compensator.end_sync()
    assert_columns(compensator, weights, layout)
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
    assert channels(compensator) == ALL_PLANTED and compensator._pending.lists is None
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


@pytest.mark.parametrize("step", ["refresh", "write_parts"])
def test_what_fails_leaves_lists_and_columns_as_they_are(log, monkeypatch, tmp_path, step):
    """After the new lists were written: those in force belong to the columns."""
    from quads_common.compensation import controller

    chosen, units = bf16(), stored()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    path = str(tmp_path / "selection")
    compensator.refresh_now()
    compensator.save(path, lambda parts: [parts])
    compensator._pending.lists = None
    original = getattr(controller, step)

    def failing(*args, **kwargs):
        original(*args, **kwargs)
        assert channels(compensator) == ALL_PLANTED
        raise RuntimeError("in the middle")

    monkeypatch.setattr(controller, step, failing)
    with pytest.raises(RuntimeError, match="in the middle"):
        compensator.refresh_now() if step == "refresh" else compensator.load(path)
    assert channels(compensator) == NONE and compensator._pending.lists is None
    monkeypatch.undo()
    weights = send(compensator, units, 1)
    compensator.end_sync()
    assert channels(compensator) == ALL_PLANTED
    assert_columns(compensator, weights)
