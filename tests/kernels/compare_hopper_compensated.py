"""Comparisons of the ``hopper`` kernels that compensate GEMM2's input; a GPU is needed.

Yields as ``compare_compensated`` does. Each stage is compared on the results of the one before:
GEMM1 within the accumulation bound, GEMM2's operand with the Triton quantizer's bits, GEMM2 within
the bound.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from quads_common.activation import Activation
from quads_common.compensation.moe import fused_moe_compensated
from quads_common.compensation.operands import InputCompensation
from quads_common.kernels import hopper
from quads_common.kernels.compensated import fused_moe_compensated_hopper
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.hopper import DecodePlan, Inspection, RowCompensation
from quads_common.kernels.hopper_columns import column_counts, hot_columns
from quads_common.kernels.hopper_memory import fused_capacity, pair_capacity
from quads_common.kernels.moe import DOWN, GATE_UP, fused_moe_hopper
from quads_common.kernels.route import Routes
from tests.kernels.compare_compensated import grouped_excess, row_errors
from tests.kernels.compare_gemm import random_ids
from tests.kernels.compensated_cases import PRESETS, Preset, hot_rows, tile_columns
from tests.kernels.exact import random_weight
from tests.kernels.staged import new_gathering, staged_as

Check = tuple[str, bool, str]

# What compensates w13's and w2's input.
CASES = {name: (PRESETS[name],) * 2 for name in ("rac", "rac all, alpha", "splice", "splice rac")}
COLUMN_CASES = {
    "columns": (Preset(channels=64, columns=True), Preset(channels=32, columns=True)),
    "columns rac": (Preset(0.5, 48, True), Preset(0.5, 16, True)),
    "columns of w13": (Preset(channels=64, columns=True), PRESETS["rac"]),
    "columns of w2": (PRESETS["splice"], Preset(channels=80, columns=True)),
}


def hopper_layers(
    device: str, shapes: dict, quick: bool, names: tuple[str, ...] | None = None
) -> Iterator[Check]:
    """names: of the cases; None: all, or with ``quick`` those that differ most."""
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator().manual_seed(51)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator)
    w2 = random_weight(experts, hidden, inner, generator=generator)
    weights = [type(w)(*(t.to(device) for t in (w.packed, w.block_scale, w.global_scale)))
               for w in (w13, w2)]  # fmt: skip
    tiled = GATE_UP.tile(weights[0]), DOWN.tile(weights[1])
    every = list((CASES | COLUMN_CASES).items())
    cases = dict(every[: len(CASES) + 2 if quick else None])
    if names is not None:
        cases = {name: presets for name, presets in every if name in names}
    for tokens in (20,) if quick else (1, 5, 100):
        x = hot_rows(tokens, hidden, generator, torch.bfloat16).to(device)
        ids = random_ids(tokens, top_k, experts, torch.Generator().manual_seed(tokens))
        if tokens > 1:
            ids[1, 0] = -1
        ids = ids.to(device)
        router = torch.rand(ids.shape, generator=generator).to(device)
        for name, presets in cases.items():
            lists = lists_of(presets, hidden, inner, experts, device)
            label = f"hopper {tokens} {name}"
            yield from one_layer(label, x, weights, tiled, router, ids, lists)
            if tokens > 5 and name in COLUMN_CASES:  # full blocks
                few = torch.where(ids < 0, ids, ids % max(1, experts // 4))
                yield from one_layer(f"{label} few experts", x, weights, tiled, router, few, lists)
    nothing = {"w13_input": InputCompensation(), "w2_input": InputCompensation()}
    got = fused_moe_compensated_hopper(x, *tiled, router, ids, **nothing)
    differ = int((got != fused_moe_hopper(x, *tiled, router, ids)).sum())
    yield "hopper, nothing selected", differ == 0, f"{differ} differ from plain"


def lists_of(
    presets: tuple[Preset, Preset], hidden: int, inner: int, experts: int, device: str
) -> list[InputCompensation]:
    """Columns of both differ from expert to expert and are as large as the random weights, so that
    a wrong one is far outside the bound."""
    generator, found = torch.Generator().manual_seed(52), []
    for preset, width, groups, rows in (
        (presets[0], hidden, 1, 2 * inner),
        (presets[1], inner, experts, hidden),
    ):
        lists = preset.lists(width, groups, 1, device)
        if lists.channels is not None and preset.columns:
            shape = (experts, rows, lists.channels.shape[1])
            columns = 64 * torch.randn(shape, generator=generator)
            lists = replace(lists, columns=columns.bfloat16().to(device))
        found.append(lists)
    return found


def one_layer(name, x, weights, tiled, router, ids, lists) -> Iterator[Check]:
    first, second = lists
    tokens, top_k = ids.shape
    hidden, inner, experts = x.shape[1], tiled[1].shape[2], tiled[1].shape[0]
    routes = Routes(ids, None, experts)
    flat = ids.flatten().long()
    valid = flat >= 0
    rows = compensate_rows(x, first)
    compensation = RowCompensation(second.block_mask, second.hot_bits, second.alpha)
    counts = column_counts(first, second)
    stored = tile_columns(first, GATE_UP), tile_columns(second, DOWN)
    columns = hot_columns(stored[0], rows.hot, stored[1])
    slots, results = tokens * top_k, []
    for plan in (
        DecodePlan("fused", min(32, fused_capacity(hidden, inner, counts))),
        DecodePlan("pair", min(32, pair_capacity(hidden, inner, counts))),
        DecodePlan("few", 8),
    ):

        def fresh(*shape, dtype):
            return torch.full(shape, torch.nan, dtype=dtype, device=x.device)

        seen = Inspection(
            fresh(slots, 2 * inner, dtype=torch.bfloat16),
            fresh(slots, 8, inner // 8, dtype=torch.bfloat16),
            fresh(slots, 8, inner // 8, dtype=torch.float16),
            fresh(slots, dtype=torch.float32),
        )  # fmt: skip
        label, arguments = f"{name} {plan.form}", (rows.operand, *tiled, routes, router, plan, None)
        out = hopper.decode_experts(*arguments, seen, compensation, None, columns)
        excess = grouped_excess(seen.y, x, first, weights[0], flat, top_k, False, None)
        yield f"{label} gemm1", excess <= 1, f"worst error {excess:.3f} of the bound"
        want = compensate_rows(seen.y, second, activation=Activation(), routes=routes).operand
        values = want.values[:, :, : inner // 8]
        differ = int((seen.operand[valid] != values[valid]).sum())
        scales = int((seen.row_scale[valid] != want.row_scale[valid]).sum())
        yield f"{label} operand", differ + scales == 0, f"{differ} values, {scales} scales differ"
        product = seen.product.transpose(1, 2).reshape(slots, inner)
        excess = grouped_excess(out, product, second, weights[1], flat, 1, False, router.flatten())
        yield f"{label} gemm2", excess <= 1, f"worst error {excess:.3f} of the bound"
        staging = new_gathering(tokens, top_k, (hidden, inner), x.dtype, x.device).w2
        bare = hopper.decode_experts(*arguments, None, compensation, staging, columns)
        ok = torch.equal(bare[valid], out[valid])
        yield f"{label} kept", *staged_as(staging, product.reshape(tokens, top_k, inner), ids)
        yield f"{label} without inspection", ok, "bits differ"
        results.append(out[valid])
    # "few" sums K in parts.
    yield f"{name} fused and pair", torch.equal(*results[:2]), "bits differ"
    both = {"w13_input": first, "w2_input": second}
    tiled_both = {"w13_input": stored[0], "w2_input": stored[1]}
    gathering = new_gathering(tokens, top_k, (hidden, inner), x.dtype, x.device)
    whole = fused_moe_compensated_hopper(x, *tiled, router, ids, **tiled_both, gathering=gathering)
    error = float(row_errors(whole, fused_moe_compensated(x, *weights, router, ids, **both)).mean())
    kept = staged_as(gathering.w13, x)
    found = gathering.w2.groups.reshape(-1, top_k)
    chosen = gathering.w2.sample_map >= 0
    kept_ids = torch.equal(found[gathering.w2.sample_map[chosen].long()], ids[chosen].int())
    ok = error < 2e-2 and kept[0] and kept_ids
    yield f"{name} whole", ok, f"mean error of a row {error:.1e}; {kept[1]}, experts {kept_ids}"
