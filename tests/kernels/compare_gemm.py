"""Comparisons of routing, GEMMs and layers with the torch code and float64.

Each function yields (name, whether it holds, figures) for a device and model shapes.
"""

from collections.abc import Iterator

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import linear, scaled_operand
from quads_common.kernels.gemm import GemmConfig, grouped_gemm, linear_triton
from quads_common.kernels.moe import fused_moe_triton, moe_config
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import fused_moe, local_expert_ids, sum_slots
from quads_common.weight_tiles import TileLayout
from tests.kernels.exact import (
    moe_reference,
    product_and_bound,
    random_rows,
    random_weight,
    weight_operand,
    worst_excess,
)

Check = tuple[str, bool, str]


def routing(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Routing tables against a sort on the host."""
    generator = torch.Generator().manual_seed(4)
    for name, (_, _, experts, top_k) in shapes.items():
        for count in (1, 3, 16) if quick else (1, 4, 16, 128, 512, 513, 4096):
            for mode in ("plain", "skipped", "mapped", "skewed", "beyond the map"):
                ids = random_ids(count, top_k, experts, generator)
                expert_map, local = None, experts
                if mode == "skipped":
                    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
                if mode == "mapped":
                    local = experts // 2
                    expert_map = torch.full((experts,), -1, dtype=torch.int32)
                    chosen = torch.randperm(experts, generator=generator)[:local]
                    expert_map[chosen] = torch.arange(local, dtype=torch.int32)
                if mode == "beyond the map":
                    # What an id would read behind the map names an expert.
                    expert_map = torch.arange(2 * experts, dtype=torch.int32, device=device)
                    expert_map = (expert_map % experts)[:experts]
                    ids[:, -1] += experts
                if mode == "skewed":
                    ids[:, 0] = 1
                ids = ids.to(device)
                expert_map = None if expert_map is None else expert_map.to(device)
                routes = Routes(ids, expert_map, local)
                for block_m in (16, 64):
                    table = make_table(routes, block_m)
                    ok = table_is_right(
                        table.slots.cpu(), table.experts.cpu(),
                        local_expert_ids(ids, expert_map).flatten().cpu(), block_m,
                    )  # fmt: skip
                    yield f"routing {name} {count} {mode} block_m {block_m}", ok, ""


def random_ids(count: int, top_k: int, experts: int, generator: torch.Generator) -> torch.Tensor:
    scores = torch.rand((count, experts), generator=generator)
    return scores.topk(top_k, dim=1).indices.int()


def table_is_right(
    slots: torch.Tensor, experts: torch.Tensor, ids: torch.Tensor, block_m: int
) -> bool:
    """Whether the blocks hold each expert's slots in order, then padding, then nothing."""
    expected_slots, expected_experts = [], []
    for expert in range(int(ids.max()) + 1 if ids.numel() else 0):
        mine = (ids == expert).nonzero().flatten().tolist()
        mine += [ids.numel()] * (-len(mine) % block_m)
        expected_slots += mine
        expected_experts += [expert] * (len(mine) // block_m)
    used = len(expected_experts)
    if used > experts.numel():
        return False
    ok = experts[:used].tolist() == expected_experts and bool((experts[used:] == -1).all())
    return ok and slots[: used * block_m].tolist() == expected_slots


CONFIGS = [
    GemmConfig(16, 64, 256),
    GemmConfig(64, 64, 128, swap=False),
    GemmConfig(32, 128, 256),
    GemmConfig(16, 64, 256, swap=False),
    GemmConfig(64, 128, 128),
    GemmConfig(16, 128, 128),
]
FORMATS = [
    ("nvfp4", torch.bfloat16),
    ("nvfp4", torch.float32),
    ("bf16", torch.bfloat16),
    ("bf16", torch.float16),
]


def linears(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Linears against float64: exact data to the bit, random data within the bound."""
    sizes = [(5, 50, 96)] if quick else [(1, 4096, 2048), (37, 720, 2880), (130, 1000, 464)]
    for i, size in enumerate(sizes):
        for act, dtype in FORMATS:
            yield from one_linear(device, *size, CONFIGS[2 * i], act, dtype)
        yield from one_linear(device, *size, CONFIGS[2 * i + 1], *FORMATS[0])


def one_linear(
    device: str, rows: int, n: int, k: int, config: GemmConfig, act: str, dtype: torch.dtype
) -> Iterator[Check]:
    generator = torch.Generator(device).manual_seed(5)
    for exact in (True, False):
        w = random_weight(n, k, generator=generator, device=device, exact=exact)
        x = random_rows(rows, k, generator=generator, dtype=dtype, device=device, exact=exact)
        bias = torch.randn(n, generator=generator, device=device).to(dtype)
        got = linear_triton(x, w, bias, act=act, config=config)
        if exact:
            differ = int((got != linear(x, w, bias, act=act)).sum())
            ok, text = differ == 0, f"{differ} of {got.numel()} differ from torch"
        else:
            operand, row_scale = scaled_operand(x, act)
            factor = (row_scale * w.global_scale).double()
            want, bound = product_and_bound(operand.double(), weight_operand(w), factor)
            bound = bound + bias.double().abs() * 2**-23
            excess = worst_excess(got, want + bias.double(), bound, dtype)
            ok, text = excess <= 1, f"worst error {excess:.3f} of the bound"
        kind = "exact" if exact else "random"
        yield f"linear {rows}x{n}x{k} {act} {dtype} {kind} {config}", ok, text


def layers(
    device: str, shapes: dict, quick: bool, counts: tuple[int, ...] = (1, 16, 128, 1024)
) -> Iterator[Check]:
    """MoE layers stage by stage against float64, and whole against the torch layer."""
    generator = torch.Generator(device).manual_seed(6)
    for name, (hidden, inner, experts, top_k) in shapes.items():
        w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
        w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
        for count in (3,) if quick else counts:
            for act in ("nvfp4", "bf16"):
                x = random_rows(count, hidden, generator=generator, device=device)
                cpu = torch.Generator().manual_seed(count)
                ids = random_ids(count, top_k, experts, cpu).to(device)
                if count > 1:
                    ids[1, 0] = -1
                router = torch.rand(ids.shape, generator=generator, device=device)
                yield from one_layer(f"moe {name} {count} {act}", x, w13, w2, router, ids, act)


def one_layer(
    name: str, x: torch.Tensor, w13: QuantizedTensor, w2: QuantizedTensor, router: torch.Tensor,
    ids: torch.Tensor, act: str,
) -> Iterator[Check]:  # fmt: skip
    """Each stage on the results of the one before, then the whole layer."""
    tokens_, top_k = ids.shape
    routes = Routes(ids, None, w13.shape[0])
    config = moe_config(tokens_, top_k, w13.shape[0])
    table = make_table(routes, config.gemm1.block_m)
    flat = ids.flatten().long()
    valid = (flat >= 0).nonzero().flatten()
    operand = quantize_rows(x, quantized=act == "nvfp4").operand
    assert operand is not None
    y = torch.full((tokens_ * top_k, w13.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    grouped_gemm(operand, w13, y, config=config.gemm1, table=table, top_k=top_k)
    values, row_scale = scaled_operand(x, act)
    want, bound = moe_reference(values, row_scale, w13, valid, flat, top_k)
    excess = worst_excess(y[valid], want[valid], bound[valid], x.dtype)
    yield f"{name} gemm1", excess <= 1, f"worst error {excess:.3f} of the bound"
    quantized = act == "nvfp4"
    result = quantize_rows(
        y, activation=Activation(), quantized=quantized, routes=routes, product=True
    )
    assert result.operand is not None and result.product is not None
    slots = torch.full(
        (tokens_ * top_k, x.shape[1]), torch.nan, dtype=torch.float32, device=x.device
    )
    grouped_gemm(result.operand, w2, slots, config=config.gemm2, table=table, router_weight=router)
    safe = torch.where((flat >= 0)[:, None], result.product, 0.0)
    values, row_scale = scaled_operand(safe.to(x.dtype), act)
    want, bound = moe_reference(values, row_scale, w2, valid, flat, 1)
    factor = router.flatten().double()[:, None]
    want, bound = want * factor, bound * factor.abs()
    excess = worst_excess(slots[valid], want[valid], bound[valid], torch.float32)
    yield f"{name} gemm2", excess <= 1, f"worst error {excess:.3f} of the bound"
    out = sum_slots_triton(slots, routes, x.dtype)
    kept = torch.where((flat >= 0)[:, None], slots, 0.0)
    expected = sum_slots(kept.reshape(tokens_, top_k, -1)).to(x.dtype)
    differ = int((out != expected).sum())
    yield f"{name} sum", differ == 0, f"{differ} of {out.numel()} differ"
    whole = fused_moe_triton(x, w13, w2, router, ids, act=act)
    again = fused_moe_triton(x, w13, w2, router, ids, act=act)
    ok = bool(torch.equal(whole, out) and torch.equal(whole, again))
    reference = fused_moe(x, w13, w2, router, ids, act=act)
    error = float((whole.double() - reference.double()).norm() / reference.double().norm())
    share = float((whole != reference).float().mean())
    # A GEMM1 output on a rounding boundary can move a row's amax, and so all codes of the row.
    text = f"same as its stages: {ok}; to torch: rms {error:.1e}, {share:.1e} differ"
    yield f"{name} whole", ok and error < 2e-2, text
    if tokens_ > 1:
        alone = fused_moe_triton(
            x[:1].contiguous(), w13, w2, router[:1], ids[:1], act=act, config=config
        )
        ok = bool(torch.equal(alone[0], whole[0]))
        yield f"{name} first token alone", ok, "bits equal" if ok else "bits differ"


def tiled_layers(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """Layers that read tiled weights: the same products in the same order, hence the same bits."""
    generator = torch.Generator(device).manual_seed(8)
    sizes = [(256, 128, 3, 2)] if quick else [(2048, 768, 128, 8), (4096, 384, 128, 8)]
    for hidden, inner, experts, top_k in sizes:
        w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
        w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
        tiled = TileLayout(gate_up=True).tile(w13), TileLayout(gate_up=False).tile(w2)
        for count in (4,) if quick else (4, 200, 2000):
            for act in ("nvfp4", "bf16"):
                x = random_rows(count, hidden, generator=generator, device=device)
                ids = random_ids(count, top_k, experts, torch.Generator().manual_seed(count))
                ids = ids.to(device)
                router = torch.rand(ids.shape, generator=generator, device=device)
                want = fused_moe_triton(x, w13, w2, router, ids, act=act)
                got = fused_moe_triton(x, *tiled, router, ids, act=act, tiled=True)
                differ = int((got != want).sum())
                yield f"tiled {hidden}x{inner} {count} {act}", differ == 0, f"{differ} differ"


def graphs(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """A captured layer follows its inputs, routing included."""
    if device == "cpu":
        return
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator(device).manual_seed(7)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device=device)
    w2 = random_weight(experts, hidden, inner, generator=generator, device=device)
    for count in (4, 128):
        x = random_rows(count, hidden, generator=generator, device=device)
        ids = random_ids(count, top_k, experts, torch.Generator().manual_seed(1)).to(device)
        router = torch.rand(ids.shape, generator=generator, device=device)
        fused_moe_triton(x, w13, w2, router, ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe_triton(x, w13, w2, router, ids)
        wrong = 0
        for seed in range(5):
            x.normal_(generator=generator)
            router.uniform_(generator=generator)
            ids.copy_(random_ids(count, top_k, experts, torch.Generator().manual_seed(seed)))
            if seed == 3:
                ids.fill_(-1)
            if seed == 4:
                ids[:, 0] = 0
            out.fill_(torch.nan)
            graph.replay()
            wrong += int((out != fused_moe_triton(x, w13, w2, router, ids)).sum())
        yield f"graph {count} tokens, 5 routings", wrong == 0, f"{wrong} differ"
    none = fused_moe_triton(x[:0], w13, w2, router[:0], ids[:0])
    yield "no tokens", none.shape == (0, hidden), str(list(none.shape))
