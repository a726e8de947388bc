"""Comparisons of the compensation kernels with ``quads_common.compensation`` and float64.

Each function yields (name, whether it holds, figures) for a device and model shapes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from quads_common.activation import Activation
from quads_common.compensation.fold import fold
from quads_common.compensation.linear import linear_compensated
from quads_common.compensation.moe import Gathering, fused_moe_compensated
from quads_common.compensation.operands import (
    InputCompensation,
    channel_bits,
    compensated_operands,
)
from quads_common.format import QuantizedTensor
from quads_common.gemm import accumulation_bound
from quads_common.kernels.compensated import (
    form_config,
    fused_moe_compensated_triton,
    linear_compensated_triton,
)
from quads_common.kernels.compensated_gemm import compensated_gemm
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.gemm import linear_triton
from quads_common.kernels.moe import DOWN, GATE_UP, fused_moe_triton, moe_config
from quads_common.kernels.route import Routes, make_table
from quads_common.kernels.rows import quantize_rows
from tests.kernels.compare_gemm import random_ids
from tests.kernels.compensated_cases import PRESETS, hot_rows, moved, tile_columns
from tests.kernels.exact import random_rows, random_weight, weight_operand, worst_excess
from tests.kernels.staged import new_gathering, staged_as

Check = tuple[str, bool, str]


def reference(
    x: torch.Tensor, lists: InputCompensation, weight: QuantizedTensor, group: int, exact: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``operands.product`` of rows in float64, folded or exact, and what float32 may be off by.

    columns of ``lists``: [N, C] of this expert.
    """
    o = compensated_operands(x, lists, group)
    w = weight_operand(weight)
    scale = o.row_scale.double() * weight.global_scale.double()
    columns = lists.columns
    if not exact:
        folded = fold(o if columns is None else replace(o, hot=None, channels=None))
        scale = folded.row_scale.double() * weight.global_scale.double()
        value, size = folded.values.double(), folded.values.double().abs()
    else:
        value, size = o.quantized.double(), o.quantized.double().abs()
        if o.residual is not None:
            value = value + o.alpha * o.residual.double()
            size = size + o.alpha * o.residual.double().abs()
    k = x.shape[1]
    result, total = (value @ w.T) * scale, (size @ w.abs().T) * scale
    bound = accumulation_bound(total, k)
    if o.hot is None or o.channels is None or (columns is None and not exact):
        return result, bound
    hot = o.hot.double()
    if columns is None:
        columns = w[:, o.channels.clamp(min=0).long()] * weight.global_scale.double()
    columns = columns.double()
    hot_size = hot.abs() @ columns.abs().T
    result = result + hot @ columns.T
    # The sum over hot channels, onto an accumulator that holds the rest; three more roundings.
    return result, bound + accumulation_bound(hot_size + total, k) + (total + hot_size) * 2.0**-22


def gemms(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Linears in both forms against float64, and nothing selected against the plain linear."""
    sizes = [(5, 50, 96)] if quick else [(1, 4096, 2048), (37, 720, 2880), (200, 1000, 464)]
    for rows, n, k in sizes:
        generator = torch.Generator().manual_seed(33)
        w = random_weight(n, k, generator=generator)
        x = hot_rows(rows, k, generator, torch.bfloat16)
        bias = torch.randn(n, generator=generator).to(x.dtype)
        on = [t.to(device) for t in (w.packed, w.block_scale.view(torch.uint8), w.global_scale)]
        weight = QuantizedTensor(on[0], on[1].view(torch.float8_e4m3fn), on[2])
        for name, preset in PRESETS.items():
            lists = one_list(preset.lists(k, 1, n, "cpu"))
            for exact in (False, True):
                got = linear_compensated_triton(
                    x.to(device), weight, bias.to(device), compensation=moved(lists, device),
                    exact=exact,
                ).cpu()  # fmt: skip
                want, bound = reference(x, lists, w, 0, exact)
                bound = bound + bias.double().abs() * 2**-23
                excess = worst_excess(got, want + bias.double(), bound, x.dtype)
                text = f"worst error {excess:.3f} of the bound"
                if exact:
                    twin = linear_compensated(x, w, bias, compensation=lists)
                    text += f", {float((twin != got).float().mean()):.1e} differ from torch"
                yield f"linear {rows}x{n}x{k} {name} exact={exact}", excess <= 1, text
        yield from nothing_selected(f"linear {rows}x{n}x{k}", x.to(device), weight)


def one_list(lists: InputCompensation) -> InputCompensation:
    """Columns of a linear: [N, C]."""
    return lists if lists.columns is None else replace(lists, columns=lists.columns[0])


def nothing_selected(name: str, x: torch.Tensor, weight: QuantizedTensor) -> Iterator[Check]:
    """Ratio 0 and count 0, as no list and as empty ones: the plain linear, bit for bit."""
    n, k = weight.shape
    plain = linear_triton(x, weight)
    mask = torch.zeros((1, k // 16), dtype=torch.bool, device=x.device)
    channels = torch.full((1, 16), -1, dtype=torch.int32, device=x.device)
    bits = channel_bits(channels, k)
    columns = x.new_zeros((n, 16))
    wrong = {}
    for what, lists in (
        ("none", InputCompensation()),
        ("no block", InputCompensation(mask)),
        ("no channel", InputCompensation(mask, channels, hot_bits=bits)),
        ("no column", InputCompensation(None, channels, columns, hot_bits=bits)),
    ):
        for exact in (False, True):
            got = linear_compensated_triton(x, weight, compensation=lists, exact=exact)
            wrong[f"{what} {exact}"] = int((got != plain).sum())
    yield f"{name} nothing selected", not any(wrong.values()), f"differ from plain: {wrong}"


def layers(
    device: str, shapes: dict, quick: bool, counts: tuple[int, ...] = (1, 16, 128, 512)
) -> Iterator[Check]:
    """MoE layers in both forms: both GEMMs against float64, then the whole against torch."""
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator().manual_seed(34)
    w13, w2 = (
        random_weight(experts, *size, generator=generator, exact=quick)
        for size in ((2 * inner, hidden), (hidden, inner))
    )
    presets = ["splice rac", "columns rac"] if quick else list(PRESETS)
    for count in (4,) if quick else counts:
        x = hot_rows(count, hidden, generator, torch.bfloat16)
        ids = random_ids(count, top_k, experts, torch.Generator().manual_seed(count))
        if count > 1:
            ids[1, 0] = -1
        router = torch.rand(ids.shape, generator=generator)
        for name in presets:
            both = (
                PRESETS[name].lists(hidden, 1, 2 * inner, "cpu"),
                PRESETS[name].lists(inner, experts, hidden, "cpu"),
            )
            if both[0].columns is not None:
                columns = both[0].columns.expand(experts, -1, -1)
                both = (replace(both[0], columns=columns.contiguous()), both[1])
            for exact in (False, True):
                yield from one_layer(
                    f"moe {count} {name} {'exact' if exact else 'folded'}", x, w13, w2, router,
                    ids, both, exact, device,
                )  # fmt: skip


def one_layer(
    name: str, x: torch.Tensor, w13: QuantizedTensor, w2: QuantizedTensor, router: torch.Tensor,
    ids: torch.Tensor, both: tuple[InputCompensation, InputCompensation], exact: bool, device: str,
) -> Iterator[Check]:  # fmt: skip
    tokens, top_k = ids.shape
    w13, w2 = (on_device(w, device) for w in (w13, w2))
    x, router, ids = x.to(device), router.to(device), ids.to(device)
    first, second = (moved(lists, device) for lists in both)
    routes = Routes(ids, None, w13.shape[0])
    config = moe_config(tokens, top_k, w13.shape[0])
    options: dict = {"exact": exact}
    flat = ids.flatten().long()
    y = torch.full((tokens * top_k, w13.shape[1]), torch.nan, dtype=x.dtype, device=device)
    rows = compensate_rows(x, first, **options)
    tile = form_config(config.gemm1, first, exact)
    table = make_table(routes, tile.block_m)
    compensated_gemm(rows, first, w13, y, config=tile, table=table, top_k=top_k)
    excess = grouped_excess(y, x, first, w13, flat, top_k, exact, None)
    yield f"{name} gemm1", excess <= 1, f"worst error {excess:.3f} of the bound"
    inner = quantize_rows(y, activation=Activation(), routes=routes, operand=False, product=True)
    rows = compensate_rows(y, second, activation=Activation(), routes=routes, **options)
    slots = torch.full((tokens * top_k, x.shape[1]), torch.nan, device=device)
    tile = form_config(config.gemm2, second, exact)
    compensated_gemm(rows, second, w2, slots, config=tile, table=table, router_weight=router)
    excess = grouped_excess(slots, inner.product, second, w2, flat, 1, exact, router.flatten())
    yield f"{name} gemm2", excess <= 1, f"worst error {excess:.3f} of the bound"
    arguments = (x, w13, w2, router, ids)
    lists = {"w13_input": first, "w2_input": second}
    gathering = new_gathering(tokens, top_k, (x.shape[1], w2.shape[2]), x.dtype, device)
    whole = fused_moe_compensated_triton(*arguments, **lists, gathering=gathering, exact=exact)
    kept = staged_as(gathering.w13, x)
    by_token = inner.product.reshape(tokens, top_k, -1)
    kept_inner = staged_as(gathering.w2, by_token, ids)
    want = fused_moe_compensated(*arguments, **lists)
    error = float(row_errors(whole, want).mean())
    ok = error < 2e-2 and kept[0] and kept_inner[0]
    yield f"{name} whole", ok, f"mean error of a row {error:.1e}; {kept[1]}; {kept_inner[1]}"


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """The relative error of each row. A GEMM1 output on a rounding boundary can move the codes of a
    whole row of GEMM2's input, by about 5%, so single rows may differ."""
    size = want.double().norm(dim=1).clamp(min=1e-30)
    return (got.double() - want.double()).norm(dim=1) / size


def on_device(w: QuantizedTensor, device: str) -> QuantizedTensor:
    scale = w.block_scale.view(torch.uint8).to(device).view(torch.float8_e4m3fn)
    return QuantizedTensor(w.packed.to(device), scale, w.global_scale.to(device))


def grouped_excess(
    got: torch.Tensor, x: torch.Tensor, lists: InputCompensation, weight: QuantizedTensor,
    ids: torch.Tensor, top_k: int, exact: bool, factor: torch.Tensor | None,
) -> float:  # fmt: skip
    """The largest error of one grouped GEMM as a multiple of what is allowed."""
    worst = 0.0
    for expert in ids.unique().tolist():
        if expert < 0:
            continue
        mine = (ids == expert).nonzero().flatten()
        one = QuantizedTensor(
            weight.packed[expert], weight.block_scale[expert], weight.global_scale[expert]
        )
        columns = None if lists.columns is None else lists.columns[expert]
        many = max(t.shape[0] for t in (lists.block_mask, lists.channels) if t is not None) > 1
        want, bound = reference(
            x[mine // top_k], replace(lists, columns=columns), one, expert if many else 0, exact
        )
        if factor is not None:
            want, bound = want * factor[mine, None].double(), bound * factor[mine, None].double()
        worst = max(worst, worst_excess(got[mine], want, bound, got.dtype))
    return worst


def refreshes(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """A captured layer sees lists, and places of sampled rows, written between two replays."""
    if device == "cpu":
        return
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator(device).manual_seed(35)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    x = random_rows(100, hidden, generator=generator, device=device)
    ids = random_ids(100, top_k, experts, torch.Generator().manual_seed(1)).to(device)
    router = torch.rand(ids.shape, generator=generator, device=device)
    lists = {
        "w13_input": PRESETS["splice rac"].lists(hidden, 1, 4, device),
        "w2_input": PRESETS["splice rac"].lists(inner, experts, 4, device),
    }
    gatherings = [new_gathering(100, top_k, (hidden, inner), x.dtype, device) for _ in range(2)]
    sample_map = gatherings[0].w13.sample_map
    sampled = sample_map.clone()
    graph = torch.cuda.CUDAGraph()

    def run(which: int) -> torch.Tensor:
        gathering = gatherings[which]
        both = (replace(s, sample_map=sample_map) for s in (gathering.w13, gathering.w2))
        return fused_moe_compensated_triton(
            x, w13, w2, router, ids, **lists, gathering=Gathering(*both)
        )

    sample_map.fill_(-1)
    run(0)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = run(0)
    outputs, wrong = [], 0
    for step in range(4):
        x.normal_(generator=generator)
        for tensor in (lists["w13_input"], lists["w2_input"]):
            tensor.block_mask.copy_(torch.rand(tensor.block_mask.shape, device=device) < 0.5)
            if step == 2:
                tensor.channels.fill_(-1)
                tensor.hot_bits.zero_()
        sample_map.copy_(sampled if step % 2 else torch.full_like(sampled, -1))
        graph.replay()
        outputs.append(out.clone())
        wrong += int((outputs[-1] != run(1)).sum())
    torch.cuda.synchronize()
    same_rows = all(
        torch.equal(getattr(a, name), getattr(b, name))
        for a, b in zip(*((g.w13, g.w2) for g in gatherings), strict=True)
        for name in ("rows", "groups")
    )
    kept = int((gatherings[0].w13.groups >= 0).sum())
    ok = wrong == 0 and same_rows and kept == int((sampled >= 0).sum())
    yield "graph follows refreshes", ok, f"{wrong} differ, rows kept {same_rows}, {kept}"


def plain_layers(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """An MoE layer whose lists are empty: the plain layer, bit for bit."""
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator(device).manual_seed(36)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    x = random_rows(3 if quick else 33, hidden, generator=generator, device=device)
    ids = random_ids(len(x), top_k, experts, torch.Generator().manual_seed(1)).to(device)
    router = torch.rand(ids.shape, generator=generator, device=device)
    plain = fused_moe_triton(x, w13, w2, router, ids)
    for name in ("none", "empty"):
        first = second = InputCompensation()
        if name == "empty":
            first, second = (
                InputCompensation(
                    torch.zeros((groups, width // 16), dtype=torch.bool, device=device),
                    torch.full((groups, 16), -1, dtype=torch.int32, device=device),
                    hot_bits=torch.zeros((groups, width // 16), dtype=torch.int32, device=device),
                )
                for groups, width in ((1, hidden), (experts, inner))
            )
        got = fused_moe_compensated_triton(
            x, w13, w2, router, ids, w13_input=first, w2_input=second
        )
        wrong = int((got != plain).sum())
        yield f"moe, {name} selected", wrong == 0, f"{wrong} differ from plain"


def tiled_layers(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Tiled weights give what canonical ones do, up to the order of sums."""
    hidden, inner, experts, top_k = (128, 128, 3, 1) if quick else next(iter(shapes.values()))
    generator = torch.Generator(device).manual_seed(37)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    tiled = GATE_UP.tile(w13), DOWN.tile(w2)
    x = random_rows(3 if quick else 64, hidden, generator=generator, device=device)
    ids = random_ids(len(x), top_k, experts, torch.Generator().manual_seed(1)).to(device)
    if quick:
        ids = torch.arange(3, device=device).unsqueeze(1)  # all of them; the last has no channels
    router = torch.rand(ids.shape, generator=generator, device=device)
    for name, exact in (
        ("splice rac", False),
        ("splice rac", True),
        ("columns", False),
        ("columns rac", True),
    ):
        first = PRESETS[name].lists(hidden, 1, 2 * inner, device)
        if first.columns is not None:  # another one for each expert
            size = (experts, *first.columns.shape[1:])
            columns = torch.randn(size, generator=generator, device=device).bfloat16()
            first = replace(first, columns=columns)
        lists: dict = {
            "w13_input": first,
            "w2_input": PRESETS[name].lists(inner, experts, hidden, device),
            "exact": exact,
        }
        want = fused_moe_compensated_triton(x, w13, w2, router, ids, **lists)
        lists |= {
            name: tile_columns(lists[name], layout)
            for name, layout in (("w13_input", GATE_UP), ("w2_input", DOWN))
        }
        got = fused_moe_compensated_triton(x, *tiled, router, ids, **lists, tiled=True)
        error = float(row_errors(got, want).mean())
        yield f"moe tiled {name} exact={exact}", error < 5e-3, f"mean error of a row {error:.1e}"
