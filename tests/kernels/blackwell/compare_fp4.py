"""Comparisons of the native FP4 layers with float64 and with the torch layers.

Each function yields (name, whether it holds, figures) for a device.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from quads_common.activation import Activation
from quads_common.compensation import fused_moe_compensated, linear_compensated
from quads_common.compensation.operands import InputCompensation, channel_bits, compensated_operands
from quads_common.format import QuantizedTensor
from quads_common.gemm import linear
from quads_common.kernels.blackwell.gemm import Fp4Config, fp4_config, grouped_gemm_fp4
from quads_common.kernels.blackwell.linear import linear_blackwell
from quads_common.kernels.blackwell.moe import fused_moe_blackwell
from quads_common.kernels.blackwell.rows import pack_rows, pack_rows_ref
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import local_expert_ids, sum_slots
from tests.kernels.blackwell.exact_fp4 import excess, grouped, one_matrix, product_and_bound
from tests.kernels.exact import random_rows, random_weight

Check = tuple[str, bool, str]
KINDS = ("plain", "rac", "rac-alpha", "rac-none", "dequant", "bf16", "rac-dequant", "rac-bf16")

# Every tile, and every kind in the smallest and one larger.
LARGER_TILES = (64, 32, 64, 128, 128, 64, 32)
TILES_OF = {kind: (16, tile) for kind, tile in zip(KINDS[1:], LARGER_TILES, strict=True)}


def random_lists(
    kind: str, width: int, groups: int, experts: int, n: int, generator: torch.Generator
) -> InputCompensation:
    """Lists of a kind: about half of the blocks; 20 slots for channels, some of them empty.

    The last group has all of its blocks, the first none at the end of K.
    """
    mask = channels = columns = None
    if "rac" in kind:
        mask = torch.rand((groups, width // 16), generator=generator) < 0.5
        mask[0, width // 32 :] = False
        if groups > 1:
            mask[-1] = True
        if kind == "rac-none":
            mask[:] = False
    if "dequant" in kind or "bf16" in kind:
        channels = torch.full((groups, 20), -1, dtype=torch.int32)
        for group in range(groups):
            count = 20 - 3 * group
            chosen = torch.randperm(width, generator=generator)[:count].sort().values
            channels[group, :count] = chosen.int()
    if "bf16" in kind:
        columns = torch.randn((experts, n, 20), generator=generator).to(torch.bfloat16)
        columns[:, :, 17:] *= channels[:, None, 17:] >= 0
    bits = None if channels is None else channel_bits(channels, width)
    return InputCompensation(mask, channels, columns, 0.75 if kind == "rac-alpha" else 1.0, bits)


def with_outliers(x: torch.Tensor, lists: InputCompensation) -> torch.Tensor:
    """x with its hot channels 30 times as large."""
    if lists.channels is None:
        return x
    hot = lists.channels[lists.channels >= 0].long().unique()
    return x.index_copy(1, hot, x[:, hot] * 30)


def packed_rows(device: str) -> Iterator[Check]:
    """Codes, scales and hot values, byte for byte those of the torch twin."""
    generator = torch.Generator(device).manual_seed(6)
    ids = torch.tensor([[0, 3], [1, -1], [3, 2]], dtype=torch.int32)
    routes = Routes(ids, torch.tensor([2, 0, -1, 1], dtype=torch.int32), 3)
    cases = {
        "x": (1, {"row_factor": torch.rand(6, generator=generator)}),
        "experts": (3, {"activation": Activation("relu2_no_mul"), "routes": routes}),
    }
    for kind in ("plain", "rac", "dequant", "rac-bf16"):
        for name, (groups, options) in cases.items():
            lists = random_lists(kind, 208, groups, groups, 4, generator)
            x = with_outliers(random_rows(6, 208, generator=generator, device=device), lists)
            x[4, 7] = torch.nan
            got, want = (make(x, lists, **options) for make in (pack_rows, pack_rows_ref))
            valid = torch.ones(6, dtype=torch.bool)
            if groups > 1:
                valid = local_expert_ids(ids, routes.expert_map).flatten() >= 0
            good = valid.clone()
            good[4] = False  # of a row with NaN only the scale is specified
            pairs = [
                (got.packed[:, good], want.packed[:, good]),
                (
                    got.block_scale.view(torch.uint8)[:, good],
                    want.block_scale.view(torch.uint8)[:, good],
                ),
                (got.row_scale[good], want.row_scale[good]),
                (got.row_scale[valid].isnan(), want.row_scale[valid].isnan()),
            ]
            if want.hot is not None:
                pairs.append((got.hot[good].view(torch.int16), want.hot[good].view(torch.int16)))
            same = all(torch.equal(*pair) for pair in pairs) and (got.hot is None) == (
                want.hot is None
            )
            yield f"rows {kind} {name}", same, "equal" if same else "differ"


def linears(device: str) -> Iterator[Check]:
    """Plain linears: exact sums to the bit, others within the bound; every tile and odd sizes."""
    sizes = [(5, 50, 96), (3, 20, 512), (20, 130, 256), (40, 128, 272), (70, 140, 400)]
    generator = torch.Generator(device).manual_seed(1)
    for rows, n, k in sizes:
        config = fp4_config(rows, k)
        for dtype in (torch.bfloat16, torch.float32) if rows == 5 else (torch.bfloat16,):
            w = random_weight(n, k, generator=generator, device=device, exact=True)
            x = random_rows(rows, k, generator=generator, device=device, dtype=dtype, exact=True)
            bias = torch.randn(n, generator=generator, device=device).to(dtype)
            got, want = linear_blackwell(x, w, bias), linear(x, w, bias)
            differ = int((got != want).sum())
            yield f"linear {rows}x{n}x{k} {dtype} exact {config}", differ == 0, f"{differ} differ"
            x = random_rows(rows, k, generator=generator, device=device, dtype=dtype)
            w = random_weight(n, k, generator=generator, device=device)
            exact, bound = product_and_bound(compensated_operands(x, InputCompensation()), w, None)
            worst = excess(linear_blackwell(x, w), exact, bound, dtype)
            yield f"linear {rows}x{n}x{k} {dtype} random", worst <= 1, f"{worst:.3f} of the bound"


def compensated_gemms(device: str) -> Iterator[Check]:
    """Every kind of compensation within the bound; nothing selected is bit-equal to plain."""
    generator = torch.Generator(device).manual_seed(2)
    sizes = {16: (6, 70, 304), 32: (19, 33, 128), 64: (35, 130, 272), 128: (66, 20, 144)}
    for kind in KINDS[1:]:
        for block_m in TILES_OF[kind]:
            rows, n, k = sizes[block_m]
            w = random_weight(1, n, k, generator=generator, device=device)
            lists = random_lists(kind, k, 1, 1, n, generator)
            x = with_outliers(random_rows(rows, k, generator=generator, device=device), lists)
            config = fp4_config(block_m, k, "rac" in kind)
            got = gemm(x, w, lists, config)
            columns = None if lists.columns is None else lists.columns[0]
            matrix = one_matrix(w, 0)
            exact, bound = product_and_bound(compensated_operands(x, lists), matrix, columns)
            worst = excess(got, exact, bound, torch.float32)
            yield f"gemm {kind} {rows}x{n}x{k}", worst <= 1, f"{worst:.3f} of the bound"
            flat = replace(lists, columns=columns)
            got = linear_blackwell(x, matrix, compensation=flat, config=config)
            want = linear_compensated(x, matrix, compensation=flat)
            worst = excess(got, exact, bound, x.dtype)
            torch_worst = excess(want, exact, bound, x.dtype)
            text = f"{worst:.3f} of the bound, the torch layer {torch_worst:.3f}"
            yield f"linear {kind} {rows}x{n}x{k}", worst <= 1 and torch_worst <= 1, text
            if kind == "rac-none":
                same = torch.equal(got, linear_blackwell(x, matrix, config=config))
                yield f"linear {kind}: plain", same, "bit-equal" if same else "differs"


def gemm(
    x: torch.Tensor, w: QuantizedTensor, lists: InputCompensation, config: Fp4Config | None = None
) -> torch.Tensor:
    """The float32 results of one expert, before a rounding to the model's dtype hides anything."""
    y = torch.full((len(x), w.shape[1]), torch.nan, device=x.device)
    config = config or fp4_config(len(x), x.shape[1])
    grouped_gemm_fp4(pack_rows(x, lists), w, y, config=config, compensation=lists)
    return y


def refreshes(device: str) -> Iterator[Check]:
    """Lists that change in place: the same tensors give what fresh ones would."""
    generator = torch.Generator(device).manual_seed(4)
    w = random_weight(1, 20, 304, generator=generator, device=device)
    x = random_rows(5, 304, generator=generator, device=device)
    lists = random_lists("rac-dequant", 304, 1, 1, 20, generator)
    old = gemm(x, w, lists)
    new = random_lists("rac-dequant", 304, 1, 1, 20, generator)
    lists.block_mask.copy_(new.block_mask)
    lists.channels.copy_(new.channels)
    lists.hot_bits.copy_(new.hot_bits)
    got, want = (gemm(x, w, these) for these in (lists, new))
    yield "refresh in place", torch.equal(got, want) and not torch.equal(got, old), ""


def bad_rows(device: str) -> Iterator[Check]:
    """A row with NaN or Inf, cold or hot, is NaN or Inf itself and changes no other."""
    generator = torch.Generator(device).manual_seed(5)
    w = random_weight(1, 20, 304, generator=generator, device=device, exact=True)
    lists = random_lists("rac-dequant", 304, 1, 1, 20, generator)
    hot = int(lists.channels[0, 0])
    cold = next(c for c in range(304) if c not in lists.channels[0])
    x = random_rows(6, 304, generator=generator, device=device)
    good = gemm(x, w, lists)
    for channel in (cold, hot):
        for value in (float("nan"), float("inf")):
            bad = x.clone()
            bad[2, channel] = value
            got = gemm(bad, w, lists)
            others = [0, 1, 3, 4, 5]
            ok = torch.equal(got[others], good[others]) and not bool(got[2].isfinite().any())
            yield f"bad row: {value} in channel {channel}", ok, str(got[2, :4].tolist())


def layers(device: str) -> Iterator[Check]:
    """MoE layers: each stage on the results of the one before, then whole against torch."""
    for i, kind in enumerate(("plain", "rac", "dequant", "rac-bf16", "rac-dequant")):
        yield from one_layer(f"moe {kind}", device, kind, bias=i % 2 == 0, mapped=i > 2)


def one_layer(name: str, device: str, kind: str, bias: bool, mapped: bool) -> Iterator[Check]:
    """An expert without rows, skipped slots, and with ``mapped`` experts of another rank."""
    generator = torch.Generator(device).manual_seed(3)
    tokens, hidden, inner, experts, top_k = 5, 160, 48, 4, 2
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    biases = (None, None)
    if bias:
        sizes = (2 * inner, hidden)
        biases = tuple(torch.randn((experts, n), generator=generator).bfloat16() for n in sizes)
    first = random_lists(kind, hidden, 1, experts, 2 * inner, generator)
    second = random_lists(kind, inner, experts, experts, hidden, generator)
    x = with_outliers(random_rows(tokens, hidden, generator=generator, device=device), first)
    ids = torch.tensor([[0, 3], [1, -1], [3, 1], [-1, -1], [0, 1]], dtype=torch.int32)
    expert_map = None
    if mapped:
        ids = torch.where(ids == 3, 6, ids)  # global id 6 is local 3, 1 is another rank's
        expert_map = torch.tensor([0, -1, 1, -1, 2, -1, 3, -1], dtype=torch.int32)
    router = torch.rand(ids.shape, generator=generator, device=device)
    local = local_expert_ids(ids, expert_map).flatten().long()
    routes, valid = Routes(ids, expert_map, experts), local >= 0
    configs = [fp4_config(tokens, k, "rac" in kind) for k in (hidden, inner)]
    table = make_table(routes, configs[0].block_m)

    y = torch.full((ids.numel(), 2 * inner), torch.nan, dtype=x.dtype)
    rows = pack_rows(x, first)
    grouped_gemm_fp4(
        rows, w13, y, config=configs[0], compensation=first, table=table, top_k=top_k,
        bias=biases[0],
    )  # fmt: skip
    exact, bound = grouped(x, first, w13, local, top_k, biases[0])
    worst = excess(y[valid], exact[valid], bound[valid], x.dtype)
    yield f"{name} gemm1", worst <= 1, f"{worst:.3f} of the bound"

    slots = torch.full((ids.numel(), hidden), torch.nan)
    rows = pack_rows(y, second, activation=Activation(), routes=routes)
    grouped_gemm_fp4(
        rows, w2, slots, config=configs[1], compensation=second, table=table, bias=biases[1],
        router_weight=router,
    )  # fmt: skip
    inputs = quantize_rows(
        y, activation=Activation(), quantized=False, operand=False, product=True, routes=routes
    ).product
    inputs = torch.where(valid[:, None], inputs, 0)
    exact, bound = grouped(inputs, second, w2, local, 1, biases[1])
    exact, bound = (t * router.flatten().double()[:, None] for t in (exact, bound))
    bound = bound + exact.abs() * 2.0**-24
    worst = excess(slots[valid], exact[valid], bound[valid], torch.float32)
    yield f"{name} gemm2", worst <= 1, f"{worst:.3f} of the bound"

    kept = torch.where(valid[:, None], slots, 0.0).view(tokens, top_k, -1)
    want = sum_slots(kept).to(x.dtype)
    arguments = {"expert_map": expert_map, "w13_bias": biases[0], "w2_bias": biases[1]}
    lists = {"w13_input": first, "w2_input": second}
    got = fused_moe_blackwell(x, w13, w2, router, ids, **arguments, **lists)
    same = torch.equal(got, want) and torch.equal(got, sum_slots_triton(slots, routes, x.dtype))
    reference = fused_moe_compensated(x, w13, w2, router, ids, **arguments, **lists)
    error = float((got.double() - reference.double()).norm() / reference.double().norm())
    # A GEMM1 output on a rounding boundary can move a row's amax, and so all codes of the row.
    text = f"same as its stages: {same}; to torch: rms {error:.1e}"
    yield f"{name} whole", same and error < 2e-2, text
    zero = bool((got[3] == 0).all())
    yield f"{name} token without experts", zero, "0" if zero else "not 0"
