"""Comparisons of the statistics kernels with ``compensation.staging.count_staged``.

Each function yields (name, whether it holds, figures) for a device and model shapes.

Both count the same rows with the same float32 residuals, so rows, underflows and offered tokens are
equal; sums of n float64 terms in another order differ by n * 2^-52 of the sum of magnitudes: n rows
and, for energies, the 16 squares of a block. With U = n * 2^-52 a mean may be off by U * mean |x|.
Squared deviations: Welford and Chan are good to U * kappa (Chan, Golub, LeVeque 1983), kappa^2 =
1 + mean^2 / variance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quads_common.compensation.operands import InputCompensation, channel_bits
from quads_common.compensation.staging import StagedInput, count_staged, new_staging
from quads_common.compensation.statistics import ChannelStatistics, new_statistics
from quads_common.kernels.statistics import count_staged_triton

Check = tuple[str, bool, str]

ENERGIES = ("plain_energy", "served_energy", "left_energy", "channel_energy")


@dataclass(frozen=True)
class Case:
    """Some inputs alike: ``rows`` of so many lists wait each time, in ``places`` buffers' rows."""

    width: int
    groups: int = 1
    channels: int = 0
    per_channel: bool = False
    alpha: float = 1.0
    dtype: torch.dtype = torch.bfloat16
    places: int = 9
    inputs: int = 2
    calls: tuple[int, ...] = (9, 4)


def cases(shapes: dict, quick: bool) -> dict[str, Case]:
    (hidden, inner, experts, _), *_ = shapes.values()
    if quick:
        return {
            "w13": Case(hidden, channels=16),
            "several tiles": Case(1040, channels=16, calls=(9,), inputs=1, alpha=0.5),
            "many rows": Case(16, places=300, calls=(300,), inputs=1),
            "w2": Case(inner, experts, channels=5, per_channel=True, places=20, calls=(20, 0, 7)),
            "fp32": Case(32, dtype=torch.float32, inputs=1),
            "fp16": Case(48, experts, dtype=torch.float16, inputs=3),
        }
    return {
        "w13": Case(hidden, channels=64, places=129, inputs=8, calls=(129, 128, 1)),
        "w13, RAC only": Case(hidden, places=256, inputs=3, calls=(256, 40)),
        "w2": Case(inner, experts, channels=32, places=1032, inputs=8, calls=(1032, 1000, 8)),
        "w2, per channel": Case(inner, experts, per_channel=True, places=2048, calls=(2048, 9)),
        "wide linear": Case(12288, channels=64, places=129, calls=(100, 3)),
        "wide linear, per channel": Case(2880, per_channel=True, places=33, calls=(33,)),
        "fp32": Case(464, dtype=torch.float32, places=40, calls=(19, 2), alpha=0.75),
    }


def statistics(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Rows of several forwards into the same buffers, counted together with other inputs'."""
    generator = torch.Generator(device).manual_seed(21)
    everything: dict[str, tuple[Case, list[StagedInput], list[StagedInput], list]] = {}
    for name, case in cases(shapes, quick).items():
        lists = [new_lists(case, number, device) for number in range(case.inputs)]
        got, want = ([new_input(case, served, device) for served in lists] for _ in range(2))
        largest = [torch.zeros_like(s.statistics.mean) for s in got]
        everything[name] = case, got, want, largest
    offered = 0
    for call in range(max(len(case.calls) for case, *_ in everything.values())):
        offered += 10 + call
        for case, got, want, largest in everything.values():
            for i in range(case.inputs):
                rows = case.calls[call] if call < len(case.calls) else 0
                top = fill(case, rows, got[i], want[i], generator)
                largest[i] = torch.maximum(largest[i], top)
        count_staged_triton([s for _, got, *_ in everything.values() for s in got], 10 + call)
        count_staged([s for _, _, want, _ in everything.values() for s in want], 10 + call)
    for name, (case, got, want, largest) in everything.items():
        for i in range(case.inputs):
            ok, text = close(got[i].statistics, want[i].statistics, largest[i])
            ok &= int(got[i].statistics.offered) == offered
            ok &= bool((got[i].groups == -1).all())
            yield f"statistics {name} {i}", ok and float(want[i].statistics.count.sum()) > 0, text


def new_lists(case: Case, number: int, device: str) -> InputCompensation:
    """Random distinct channels, not sorted, with -1 among them; the last list is empty if many."""
    if not case.channels:
        return InputCompensation(alpha=case.alpha)
    generator = torch.Generator().manual_seed(22 + number)
    lists = torch.stack([
        torch.randperm(case.width, generator=generator)[: case.channels]
        for _ in range(case.groups)
    ]).int()  # fmt: skip
    lists[:, 1] = -1
    if len(lists) > 1:
        lists[-1] = -1
    bits = channel_bits(lists, case.width).to(device)
    return InputCompensation(channels=lists.to(device), alpha=case.alpha, hot_bits=bits)


def new_input(case: Case, served: InputCompensation, device: str) -> StagedInput:
    stats = new_statistics(case.groups, case.width, device=device, channel_energy=case.per_channel)
    buffers = new_staging(case.places, 1, case.width, case.dtype, device)
    buffers[0].fill_(torch.nan)
    return StagedInput(stats, served, *buffers)


def fill(
    case: Case, rows: int, got: StagedInput, want: StagedInput, generator: torch.Generator
) -> torch.Tensor:
    """The same random rows wait in both, a few places empty. Returns the largest |x| of each
    channel."""
    device = got.rows.device
    x = torch.randn((rows, case.width), generator=generator, device=device)
    x = (x * 3 + 2).to(case.dtype)
    x[:, 3] *= 50
    x[2::3, -16:] = 0  # a block without a residual does not underflow
    if rows > 4:
        x[1, 7] = torch.nan
        x[-1, 0] = -torch.inf
    groups = torch.randint(-1, case.groups, (rows,), generator=generator, device=device)
    if case.groups == 1 and rows:
        groups[0] = 0
    for staged in (got, want):
        staged.rows[:rows] = x
        staged.groups[:rows] = groups.int()
    finite = x.double().nan_to_num(0, 0, 0).abs()
    top = finite.amax(dim=0) if rows else torch.zeros(case.width, device=device)
    return top.double().expand_as(want.statistics.mean)


def close(
    got: ChannelStatistics, want: ChannelStatistics, largest: torch.Tensor
) -> tuple[bool, str]:
    """Whether counts are equal and sums within the bounds above; largest: max |x| >= mean |x|."""
    bad = [
        name
        for name in ("count", "underflows", "offered")
        if not torch.equal(getattr(got, name), getattr(want, name))
    ]
    unit = want.count[:, None] * 2.0**-52
    limits = {name: (unit + 16 * 2.0**-52) * getattr(want, name) for name in ENERGIES}
    limits["mean"] = unit * largest
    kappa = (1 + want.mean.square() / want.variance.clamp(min=1e-300)).sqrt()
    limits["m2"] = unit * want.m2 * kappa + want.count[:, None] * (unit * largest).square()
    worst = 0.0
    for name, limit in limits.items():
        error = (getattr(got, name) - getattr(want, name)).abs()
        if not bool((error <= limit).all()):
            bad.append(name)
        share = torch.where(error > 0, error / limit.clamp(min=1e-300), 0.0)
        worst = max(worst, float(share.max()) if share.numel() else 0.0)
    rows, nonzero = int(want.count.sum()), int((want.count > 0).sum())
    return not bad, f"{rows} rows in {nonzero} groups, {worst:.2f} of the bound; wrong: {bad}"
