"""Units that the GPU checks late: what was refused never joins lists that are put in force."""

import pytest
import torch

from quads_common.compensation.controller import Compensator
from quads_common.format import WEIGHT_AMAX_MAX
from quads_common.quantize import quantize
from quads_common.weight_units import Piece, WeightUnits
from tests.common.samples import normal
from tests.compensation.serving import (
    EXPERTS,
    PLANTED,
    W13,
    K,
    N,
    bf16,
    channels,
    feed,
    rows_with,
    stored,
)

CPU = torch.device("cpu")


class LateQuantizer:
    """Like ``UnitQuantizer``: refuses by the amax of the whole tensors, and tells when asked."""

    def __init__(self, units: WeightUnits) -> None:
        self.units, self.maxima = units, {}

    def take(self, unit, mask, full, piece, stage, last) -> None:
        found = self.maxima.setdefault(unit, {})
        found[mask] = full.float().abs().amax()
        if last and bool(self.accepted(unit)):
            self.units._write(unit, quantize(stage, amax=torch.stack([*found.values()]).amax()))

    def accepted(self, unit) -> torch.Tensor:
        return torch.stack([*self.maxima[unit].values()]).amax() <= WEIGHT_AMAX_MAX

    def bad_parts(self, units) -> dict[int, list[int]]:
        return {unit: [0] for unit in units if not bool(self.accepted(unit))}

    def release(self) -> None:
        self.maxima.clear()


def late() -> WeightUnits:
    """As on a GPU, where nobody waits for the device to find a NaN."""
    units = stored()
    units._on_gpu = LateQuantizer(units)
    return units


BAD = {"nan": float("nan"), "inf": float("inf"), "too large": 3.38e38}


def send_one(columns, units, expert, weight, bad=None) -> None:
    """Both parts of one expert; bad: in the last row of the full tensor, another rank's."""
    for part, start in (("a", 0), ("b", N // 2)):
        full = torch.cat([weight[start : start + N // 2], torch.zeros(1, K)]).to(torch.bfloat16)
        if bad is not None and part == "a":
            full[-1, 0] = bad
        columns.load(units, expert, part, full, f"{expert}.{part}", Piece(N // 2, start))


def assert_pairs(columns, units, weights) -> None:
    """Each expert's codes and columns are those of ``weights[expert]``."""
    lists = columns.state.selection.channels
    for expert, weight in enumerate(weights):
        hot = lists[0]
        expected = torch.where(hot >= 0, weight[:, hot.clamp(min=0)], 0)
        assert torch.equal(columns.columns[expert], expected), expert
        codes = quantize(weight, amax=weight.float().abs().amax())
        assert torch.equal(units.packed[expert], codes.packed), expert


def late_sync(log):
    """w13 alone, after one whole sync, with new lists to come in the next one."""
    chosen, units = bf16(ema=0.0), late()
    compensator = Compensator(chosen, tp_size=1, log=log)
    state = compensator.add(W13, CPU)
    columns = compensator.add_columns(state, EXPERTS, N)
    compensator.weights_arrive()
    compensator.end_sync()
    compensator.loaded()
    old, new = (
        normal(EXPERTS, N, K, seed=seed, dtype=torch.float32).to(torch.bfloat16) for seed in (1, 2)
    )
    feed(state, rows_with(PLANTED, 64, 1), chosen)
    compensator.weights_arrive()
    for expert in range(EXPERTS):
        send_one(columns, units, expert, old[expert])
    assert compensator.end_sync()
    assert_pairs(columns, units, old)
    feed(state, rows_with([c ^ 2 for c in PLANTED], 64, 2), chosen)
    compensator.weights_arrive()
    return compensator, columns, units, old, new


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", range(EXPERTS))
def test_a_refused_unit_keeps_lists_codes_and_columns(log, caplog, bad, which):
    """The others have their new codes and columns, also the one whose call tells of it."""
    compensator, columns, units, old, new = late_sync(log)
    with pytest.raises(ValueError, match=f"{which}.a"):
        for expert in range(EXPERTS):
            value = BAD[bad] if expert == which else None
            send_one(columns, units, expert, new[expert], value)
    assert not compensator.end_sync()
    assert channels(compensator) == [[PLANTED]]
    assert "1 inputs keep their hot channels" in caplog.text
    mixed = [old[e] if e == which else new[e] for e in range(EXPERTS)]
    assert_pairs(columns, units, mixed)


def test_a_unit_that_nobody_looked_at_is_not_committed(log):
    """The others were looked at before, so nothing is raised when it completes the set."""
    compensator, columns, units, old, new = late_sync(log)
    for expert in range(EXPERTS - 1):
        send_one(columns, units, expert, new[expert])
    units.check()
    send_one(columns, units, EXPERTS - 1, new[EXPERTS - 1], float("nan"))
    compensator.end_sync()
    assert channels(compensator) == [[PLANTED]]
    assert_pairs(columns, units, [*new[:-1], old[-1]])


def test_a_refused_unit_that_comes_again_completes_the_sync(log):
    compensator, columns, units, _, new = late_sync(log)
    with pytest.raises(ValueError, match=r"1\.a"):
        for expert in range(EXPERTS):
            send_one(columns, units, expert, new[expert], float("nan") if expert == 1 else None)
    send_one(columns, units, 1, new[1])
    assert compensator.end_sync()
    assert channels(compensator) != [[PLANTED]]
    assert_pairs(columns, units, new)


# Errors -----------------------------------------------------------------------------------------
