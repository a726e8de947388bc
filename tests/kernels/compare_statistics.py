"""Comparisons of the statistics kernel with ``quads_common.compensation.observe``.

Each function yields (name, whether it holds, figures) for a device and model shapes.

Both count the same rows with the same float32 residuals, so rows, underflows and offered rows are
equal; sums of n float64 terms in another order differ by n * 2^-52 of the sum of magnitudes: n rows
and, for energies, the 16 squares of a block. With U = n * 2^-52 a mean may be off by U * mean |x|.
Squared deviations: Welford and Chan are good to U * kappa (Chan, Golub, LeVeque 1983), kappa^2 =
1 + mean^2 / variance.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quads_common.activation import Activation
from quads_common.compensation.observe import observe
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.statistics import ChannelStatistics, new_statistics
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.kernels.statistics import Beside, observe_triton
from quads_common.moe import local_expert_ids
from tests.kernels.compare_gemm import random_ids

Check = tuple[str, bool, str]

ENERGIES = ("plain_energy", "served_energy", "left_energy", "channel_energy")


@dataclass(frozen=True)
class Case:
    """A site: groups of 0 are one list without routing."""

    width: int
    groups: int = 0
    period: int = 3
    channels: int = 0
    per_channel: bool = False
    mask: bool = True
    alpha: float = 1.0
    mapped: bool = False
    activation: Activation | None = None
    factor: bool = False
    planes: bool = False
    dtype: torch.dtype = torch.bfloat16
    calls: tuple[int, ...] = (5, 1, 9)


def cases(shapes: dict, quick: bool) -> dict[str, Case]:
    (hidden, inner, experts, _), *_ = shapes.values()
    if quick:
        return {
            "w13": Case(hidden, channels=16),
            "no mask, every row": Case(48, mask=False, period=1, calls=(3, 2), alpha=0.5),
            "several tiles": Case(1040, channels=16, period=2, calls=(9, 5)),
            "w2": Case(inner, experts, channels=5, per_channel=True, activation=Activation()),
            "planes": Case(inner, experts, channels=5, planes=True, calls=(8,)),
            "factor, fp32": Case(32, factor=True, dtype=torch.float32, period=1, calls=(7,)),
            "expert map": Case(16, experts, mapped=True, dtype=torch.float16, calls=(12,)),
        }
    decode, prefill = (1, 5, 64, 128, 256) * 2, (4096, 300)
    return {
        "w13 decode": Case(hidden, period=64, channels=64, calls=decode),
        "w13 prefill": Case(hidden, period=64, calls=prefill),
        "w2 decode": Case(
            inner, experts, period=64, channels=32, activation=Activation(), calls=decode
        ),
        "w2 prefill": Case(
            inner, experts, period=64, channels=32, per_channel=True, calls=prefill
        ),
        "wide linear": Case(12288, period=8, channels=64, calls=(100, 3)),
        "wide linear, per channel": Case(2880, period=2, per_channel=True, calls=(33,)),
        "w2 in planes": Case(inner, experts, period=8, channels=32, planes=True, calls=(64, 5)),
        "w2, expert map": Case(inner, experts, period=4, mapped=True, calls=(64,), alpha=0.75),
        "router weight first": Case(hidden, period=4, factor=True, calls=(64,)),
        "fp32, every row": Case(464, period=1, dtype=torch.float32, calls=(19, 2)),
    }  # fmt: skip


def statistics(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Several forwards into the same buffers, then disabled ones."""
    for name, case in cases(shapes, quick).items():
        generator = torch.Generator(device).manual_seed(21)
        got, want = (new_case(case, device) for _ in range(2))
        lists = InputCompensation(
            channels=channel_lists(case, device) if case.channels else None, alpha=case.alpha
        )
        largest = torch.zeros_like(want.mean)
        for tokens in case.calls:
            largest = torch.maximum(
                largest, one_forward(case, tokens, got, want, lists, generator, device)
            )
        ok, text = close(got, want, largest)
        yield f"statistics {name}", ok and float(want.count.sum()) > 0, text
        before = {n: t.clone() for n, t in got.buffers().items()}
        got.enabled.fill_(False)
        before["enabled"].fill_(False)
        one_forward(case, case.calls[0], got, want, lists, generator, device)
        same = all(torch.equal(t, before[n]) for n, t in got.buffers().items())
        yield f"statistics {name}, switched off", same, "unchanged" if same else "changed"


def new_case(case: Case, device: str) -> ChannelStatistics:
    stats = new_statistics(
        max(1, case.groups), case.width, device=device, channel_energy=case.per_channel
    )
    stats.enabled.fill_(True)
    return stats


def channel_lists(case: Case, device: str) -> torch.Tensor:
    """Random distinct channels, not sorted, with -1 among them; the last list is empty if many."""
    generator = torch.Generator().manual_seed(22)
    lists = torch.stack([
        torch.randperm(case.width, generator=generator)[: case.channels]
        for _ in range(max(1, case.groups))
    ]).int()  # fmt: skip
    lists[:, 1] = -1
    if len(lists) > 1:
        lists[-1] = -1
    return lists.to(device)


def one_forward(
    case: Case, tokens: int, got: ChannelStatistics, want: ChannelStatistics,
    lists: InputCompensation, generator: torch.Generator, device: str,
) -> torch.Tensor:  # fmt: skip
    """Observe the same random rows with both. Returns the largest |x| of each channel."""
    top_k = 1 if case.groups == 0 else 2
    gated = case.activation is not None
    x = torch.randn((tokens * top_k, case.width * (1 + gated)), generator=generator, device=device)
    x = (x * 3 + 2).to(case.dtype)
    x[:, 3] *= 50
    if tokens > 1:
        x[1, 7] = torch.nan
        x[-1, 0] = -torch.inf
    mask = None
    if case.mask:
        mask = torch.rand(tokens, generator=generator, device=device) < 0.8
    routes = ids = expert_map = None
    if case.groups:
        ids = random_ids(tokens, top_k, case.groups, torch.Generator().manual_seed(tokens))
        ids[torch.rand(ids.shape, generator=torch.Generator().manual_seed(1)) < 0.1] = -1
        if case.mapped:
            order = torch.randperm(case.groups, generator=torch.Generator().manual_seed(3)).int()
            order[0] = -1
            expert_map = order.to(device)
        ids = ids.to(device)
        routes = Routes(ids, expert_map, case.groups)
    factor = None
    values = x
    if case.factor:
        factor = torch.rand(tokens, generator=generator, device=device)
        values = (x.float() * factor[:, None]).to(x.dtype)
    if case.activation is not None:
        values = quantize_rows(x, activation=case.activation, operand=False, product=True).product
    options: dict = {"row_mask": mask, "activation": case.activation, "row_factor": factor}
    if case.planes:
        x = x.unflatten(1, (-1, 8)).transpose(1, 2).reshape(x.shape)
        options["planes"] = True
    aside = Beside(x.device)
    aside.run(lambda: observe_triton(got, x, lists, case.period, routes=routes, **options))
    aside.join()
    if ids is not None:
        values = values.reshape(tokens, top_k, -1)
        ids = local_expert_ids(ids, expert_map)
    observe(want, values, lists, case.period, row_mask=mask, expert_ids=ids)
    finite = values.double().nan_to_num(0, 0, 0).abs().reshape(-1, case.width)
    return finite.amax(dim=0).expand_as(want.mean)


def close(
    got: ChannelStatistics, want: ChannelStatistics, largest: torch.Tensor
) -> tuple[bool, str]:
    """Whether counts are equal and sums within the bounds above; largest: max |x| >= mean |x|."""
    bad = [
        name
        for name in ("count", "underflows", "offered", "enabled")
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
