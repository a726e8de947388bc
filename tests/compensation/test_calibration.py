"""Calibration of a rank without an engine: one that fails changes nothing."""

import pytest
import torch

from quads_common.compensation.calibrate import run_passes
from tests.common.bits import assert_same_bits
from tests.compensation.serving import (
    ALL_PLANTED,
    NONE,
    bf16,
    channels,
    loaded,
    options,
    serve,
)


class Engine:
    """``rpc`` of one rank; ``runs`` are called in turn, None fails as a prompt that is too long."""

    def __init__(self, compensator, *runs):
        self.compensator, self.runs = compensator, list(runs)

    def rpc(self, method, *args):
        name = {"quads_selection_state": "state", "quads_refresh": "refresh_now"}.get(method)
        if method == "quads_save_selection":
            raise OSError("the disk is full")
        if method == "quads_probe_selection":
            return [None]
        return [getattr(self.compensator, name or method.removeprefix("quads_"))(*args)]

    def run(self):
        if (serve_rows := self.runs.pop(0)) is None:
            raise ValueError("HTTP Error 400: longer than the context length")
        serve_rows()


def buffers_of(compensator):
    return {
        f"{state.site.name} {name}": tensor.clone()
        for state in compensator.states
        for name, tensor in state.buffers().items()
        if name != "statistics_offered"
    }


def assert_unchanged(compensator, before) -> None:
    for name, tensor in buffers_of(compensator).items():
        assert_same_bits(tensor, before[name], name)


def calibrated(log, chosen):
    """A rank that has refreshed, and has counted more since."""
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    serve(compensator, chosen, seed=30)
    return compensator


@pytest.mark.parametrize("failing", ["first run", "second run", "save"])
def test_one_that_fails_changes_nothing(log, failing):
    """Not even where its first pass chose other lists, which is noted."""
    chosen = options()
    compensator = calibrated(log, chosen)
    before, digests, metrics = (
        buffers_of(compensator), compensator.state()["shared"], compensator.metrics,
    )  # fmt: skip
    nothing = lambda: None  # noqa: E731
    runs = {"first run": (None,), "second run": (nothing, None), "save": (nothing, nothing)}
    engine = Engine(compensator, *runs[failing])
    with pytest.raises((ValueError, OSError), match=r"HTTP Error 400|the disk is full"):
        run_passes(engine.rpc, engine.run, None, "somewhere")
    assert_unchanged(compensator, before)
    assert compensator.metrics == metrics and compensator.state()["shared"] == digests
    if failing != "first run":
        assert compensator.version == 3, "the lists without a channel, and back"
    compensator.refresh_now()
    assert channels(compensator) == ALL_PLANTED


def test_one_that_succeeds_keeps_no_copy(log):
    chosen = options()
    compensator = calibrated(log, chosen)
    engine = Engine(compensator, *[lambda: serve(compensator, chosen)] * 2)
    found = run_passes(engine.rpc, engine.run, None, None)
    assert found["lists_ready"] == 1 and not compensator.undo_calibration()
    before = [m.tokens for m in compensator.metrics]
    assert max(before) == 2 * 64 * 3, "what was counted before is forgotten"


def test_a_sync_that_goes_on_ends_first(log):
    """Else its refresh would choose from what has just been forgotten."""
    chosen = options()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.weights_arrive()
    compensator.begin_calibration()
    assert channels(compensator) == ALL_PLANTED
    assert not compensator.end_sync()


def test_lists_that_wait_for_a_sync_come_back(log):
    chosen = bf16()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    waiting = [lists["channels"].tolist() for lists in compensator._pending.lists]
    assert waiting == ALL_PLANTED
    before = buffers_of(compensator)
    engine = Engine(compensator, lambda: None, None)
    with pytest.raises(ValueError, match="HTTP Error 400"):
        run_passes(engine.rpc, engine.run, 2, None)
    assert_unchanged(compensator, before)
    assert [lists["channels"].tolist() for lists in compensator._pending.lists] == waiting
    assert channels(compensator) == NONE


def test_energies_of_other_hot_channels_do_not_come_back(log):
    """A sync in between has put lists of BF16 columns in force, which stay."""
    chosen = bf16()
    compensator = loaded(log, chosen)
    serve(compensator, chosen)
    compensator.refresh_now()
    serve(compensator, chosen)
    compensator.begin_calibration()
    state = compensator.states[0]
    state.selection.channels.copy_(torch.arange(16).unsqueeze(0))
    assert compensator.undo_calibration()
    assert state.selection.channels[0].tolist() == list(range(16))
    assert not state.statistics.served_energy.any()
    assert torch.equal(state.averages.uncovered, state.statistics.count)
    assert state.statistics.count[0] > 0


def test_an_undo_that_fails_is_told(log):
    def rpc(method, *args):
        if method == "quads_undo_calibration":
            raise OSError("gone")
        return [{}]

    def run():
        raise ValueError("too long")

    with pytest.raises(RuntimeError, match=r"too long; what was counted before .*back: gone"):
        run_passes(rpc, run, 1, None)


@pytest.mark.parametrize("save", [None, "somewhere"])
def test_an_engine_that_compensates_nothing_is_told_only_that(save):
    asked = []

    def rpc(method, *args):
        asked.append(method)
        return [None]

    with pytest.raises(ValueError, match=r"^this engine compensates nothing, .*than 'nvfp4'$"):
        run_passes(rpc, lambda: asked.append("run"), None, save)
    assert asked == ["quads_selection_state"]
