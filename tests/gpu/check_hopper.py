"""Compares the ``hopper`` MoE kernels with float64 and the torch code on this GPU.

    PYTHONPATH=common:. python tests/gpu/check_hopper.py

Fresh random data, poisoned outputs. Every stage is compared on the results of the one before: GEMM1
within the accumulation bound, the quantizer's codes exactly, GEMM2 within the bound, the layer with
the sum of its slots exactly. Some tokens alone must give the same bits as within their batch.
Prints what fails and one line for each group, and exits with 1 if anything failed.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from quads_common.activation import Activation
from quads_common.gemm import scaled_operand
from quads_common.kernels import hopper
from quads_common.kernels.hopper import DecodePlan, Inspection
from quads_common.kernels.hopper_memory import fused_capacity, pair_capacity
from quads_common.kernels.moe import DOWN, GATE_UP, fused_moe_hopper, fused_moe_triton
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import fused_moe, local_expert_ids, sum_slots
from tests.kernels.exact import moe_reference, random_rows, random_weight, worst_excess

Check = tuple[str, bool, str]

# H, I, experts, top_k: Qwen3-30B-A3B, Qwen3-235B at TP4, GLM-4.5-Air, and small ones with
# an odd number of tiles and few strips.
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b tp4": (4096, 384, 128, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "small": (384, 384, 12, 3),
    "few strips": (128, 128, 2, 1),
}
FUSED, PAIR, FEW = (
    DecodePlan(form, rows) for form, rows in (("fused", 32), ("pair", 32), ("few", 8))
)
ROUTINGS = ("uniform", "skipped", "skewed", "mapped", "one expert", "none")


def make_ids(tokens: int, top_k: int, experts: int, kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand((tokens, experts), generator=generator)
    if kind == "skewed":
        scores += 1.5 / torch.arange(1, experts + 1)
    ids = scores.topk(top_k, dim=1).indices.int()
    if kind == "skipped":
        ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    if kind == "one expert":
        ids.fill_(-1)
        ids[:, 0] = experts - 1
    if kind == "none":
        ids.fill_(-1)
    return ids


def make_routes(tokens: int, top_k: int, experts: int, kind: str, seed: int) -> Routes:
    """With "mapped" the router knows twice as many experts as this rank has."""
    if kind != "mapped":
        return Routes(make_ids(tokens, top_k, experts, kind, seed).cuda(), None, experts)
    generator = torch.Generator().manual_seed(seed)
    mapping = torch.full((2 * experts,), -1, dtype=torch.int32)
    mapping[torch.randperm(2 * experts, generator=generator)[:experts]] = torch.arange(
        experts, dtype=torch.int32
    )
    ids = make_ids(tokens, top_k, 2 * experts, "uniform", seed)
    return Routes(ids.long().cuda(), mapping.cuda(), experts)


def tables() -> Iterator[Check]:
    """Every slot in exactly one block, of its expert, in order; as many blocks as there must be."""
    for experts, top_k in ((128, 8), (12, 3), (512, 10), (1, 1)):
        for tokens in (1, 5, 64, 128, 256, 409):
            for kind in ROUTINGS:
                for plan in (FUSED, PAIR, FEW, DecodePlan("fused", 16), DecodePlan("pair", 24)):
                    if tokens * top_k <= hopper.MAX_SLOTS:
                        routes = make_routes(tokens, top_k, experts, kind, tokens)
                        error = table_error(routes, plan)
                        name = f"table {experts} experts {tokens} tokens {kind} {plan}"
                        yield name, not error, error


def table_error(routes: Routes, plan: DecodePlan) -> str:
    ids = local_expert_ids(routes.topk_ids.cpu(), None if routes.expert_map is None
                           else routes.expert_map.cpu()).flatten().tolist()  # fmt: skip
    count, *rest = hopper.list_blocks(routes, plan).cpu().tolist()
    width = 2 + hopper.MAX_ROWS
    blocks = [rest[i * width : (i + 1) * width] for i in range(count)]
    wanted: dict[int, list[int]] = {}
    for slot, expert in enumerate(ids):
        if expert >= 0:
            wanted.setdefault(expert, []).append(slot)
    least = sum(-(-len(s) // plan.rows) for s in wanted.values())
    if not least <= count <= least + (hopper.MAX_SPARES if plan.form == "fused" else 0):
        return f"{count} blocks, {least} are needed"
    found: dict[int, list[int]] = {}
    for expert, rows, *slots in blocks:
        if not 0 < rows <= plan.rows or slots[:rows] != sorted(slots[:rows]):
            return f"block of expert {expert} with {rows} rows: {slots}"
        found.setdefault(expert, []).extend(slots[:rows])
    groups = [-(-rows // 8) for _, rows, *_ in blocks]
    if groups != sorted(groups, reverse=True):
        return f"blocks are not in order: {groups}"
    same = {e: sorted(s) for e, s in found.items()} == wanted
    return "" if same else "slots are missing, twice or with the wrong expert"


def layers(
    shape: str,
    counts: tuple[int, ...] = (1, 3, 17, 100, 256),
    kinds: tuple[str, ...] = ROUTINGS,
) -> Iterator[Check]:
    hidden, inner, experts, top_k = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(6)
    w13 = random_weight(experts, 2 * inner, hidden, generator=generator, device="cuda")
    w2 = random_weight(experts, hidden, inner, generator=generator, device="cuda")
    tiled = GATE_UP.tile(w13), DOWN.tile(w2)
    back = GATE_UP.untile(tiled[0]), DOWN.untile(tiled[1])
    ok = all(torch.equal(b.packed, w.packed) for b, w in zip(back, (w13, w2), strict=True))
    yield f"{shape} tiles undone", ok, ""
    for tokens in counts:
        for kind in kinds if tokens in (3, 100) else ("uniform",):
            for act in ("nvfp4", "bf16"):
                routes = make_routes(tokens, top_k, experts, kind, tokens)
                x = random_rows(tokens, hidden, generator=generator, device="cuda")
                router = torch.rand((tokens, top_k), generator=generator, device="cuda")
                name = f"{shape} {tokens} {kind} {act}"
                yield from one_layer(name, x, (w13, w2), tiled, routes, router, act)


def one_layer(name, x, weights, tiled, routes, router, act) -> Iterator[Check]:
    (w13, w2), quantized = weights, act == "nvfp4"
    tokens, top_k = routes.topk_ids.shape
    slots, inner, hidden = tokens * top_k, w2.shape[2], w2.shape[1]
    local = local_expert_ids(routes.topk_ids, routes.expert_map).flatten().long()
    local = torch.where(local < routes.num_experts, local, -1)
    valid = (local >= 0).nonzero().flatten()
    operand = quantize_rows(x, quantized=quantized).operand
    results = []
    plans = (
        DecodePlan("fused", min(32, fused_capacity(hidden, inner))),
        DecodePlan("pair", min(32, pair_capacity(hidden, inner))),
        DecodePlan("few", 8),
    )
    for plan in plans:

        def fresh(*shape, dtype):
            return torch.full(shape, torch.nan, dtype=dtype, device="cuda")

        seen = Inspection(
            fresh(slots, 2 * inner, dtype=torch.bfloat16),
            fresh(slots, 8, inner // 8, dtype=torch.bfloat16),
            fresh(slots, 8, inner // 8, dtype=torch.float16),
            fresh(slots, dtype=torch.float32),
        )  # fmt: skip
        label = f"{name} {plan.form}"
        out = hopper.decode_experts(operand, *tiled, routes, router, plan, None, seen)
        values, row_scale = scaled_operand(x, act)
        want, bound = moe_reference(values, row_scale, w13, valid, local, top_k)
        excess = worst_excess(seen.y[valid], want[valid], bound[valid], torch.bfloat16)
        yield f"{label} gemm1", excess <= 1, f"worst error {excess:.3f} of the bound"
        # Planes of 8: element k is at [k % 8, k // 8].
        product = seen.product.transpose(1, 2).reshape(slots, inner)
        triton_rows = quantize_rows(
            seen.y, activation=Activation(), quantized=quantized, routes=routes, product=True
        )
        differ = int((product[valid] != triton_rows.product[valid]).sum())
        yield f"{label} product", differ == 0, f"{differ} differ from Triton's"
        safe = torch.where((local >= 0)[:, None], product, 0.0)
        values, row_scale = scaled_operand(safe, act)
        if quantized:
            got = seen.operand.transpose(1, 2).reshape(slots, inner).float()
            differ = int((got[valid] != values[valid]).sum())
            scales = int((seen.row_scale[valid] != row_scale.flatten()[valid]).sum())
            yield f"{label} codes", differ + scales == 0, f"{differ} codes, {scales} scales differ"
        want, bound = moe_reference(values, row_scale, w2, valid, local, 1)
        factor = router.flatten().double()[:, None]
        excess = worst_excess(
            out[valid], (want * factor)[valid], (bound * factor)[valid], out.dtype
        )
        yield f"{label} gemm2", excess <= 1, f"worst error {excess:.3f} of the bound"
        bare = hopper.decode_experts(operand, *tiled, routes, router, plan, None)
        ok = torch.equal(bare[valid], out[valid])
        yield f"{label} without inspection", ok, "bits differ"
        results.append(out[valid])
    yield f"{name} fused and pair", torch.equal(*results[:2]), "bits differ"
    call = {"expert_map": routes.expert_map, "act": act}
    whole = fused_moe_hopper(x, *tiled, router, routes.topk_ids, **call)
    want = fused_moe(x, w13, w2, router, routes.topk_ids, **call)
    scale = want.double().norm().clamp(min=1e-30)
    error = float((whole.double() - want.double()).norm() / scale)
    yield f"{name} whole", error < 2e-2, f"rms {error:.1e} to torch"
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    shape = (w13.shape[0], hidden, inner)
    by_form = {plan.form: result for plan, result in zip(plans, results, strict=True)}
    chosen = hopper.decode_plan(tokens, top_k, *shape, processors)
    if chosen is not None:
        summands = torch.zeros((slots, hidden), device="cuda")
        summands[valid] = by_form[chosen.form]
        summed = sum_slots(summands.view(tokens, top_k, hidden)).to(x.dtype)
        yield f"{name} sum of {chosen.form}", torch.equal(whole, summed), "bits differ"
    few = min(tokens, 5)
    mine = valid[valid < few * top_k]
    for plan in plans[1:]:
        alone = hopper.decode_experts(
            quantize_rows(x[:few].contiguous(), quantized=quantized).operand,
            *tiled,
            Routes(routes.topk_ids[:few].contiguous(), routes.expert_map, routes.num_experts),
            router[:few].contiguous(),
            plan,
            None,
        )
        ok = torch.equal(alone[mine], by_form[plan.form][: len(mine)])
        yield f"{name} first {few} tokens alone, {plan.form}", ok, "bits differ"
    if tokens == 100 and "uniform" in name:
        canonical = fused_moe_triton(x, w13, w2, router, routes.topk_ids, **call)
        by_triton = fused_moe_triton(x, *tiled, router, routes.topk_ids, tiled=True, **call)
        yield f"{name} Triton on tiles", torch.equal(canonical, by_triton), "bits differ"


def graphs() -> Iterator[Check]:
    """A captured layer follows its inputs, routing included."""
    hidden, inner, experts, top_k = SHAPES["qwen3-30b-a3b"]
    generator = torch.Generator("cuda").manual_seed(7)
    tiled = (
        GATE_UP.tile(random_weight(experts, 2 * inner, hidden, generator=generator, device="cuda")),
        DOWN.tile(random_weight(experts, hidden, inner, generator=generator, device="cuda")),
    )
    for tokens in (1, 4, 16, 128):
        x = random_rows(tokens, hidden, generator=generator, device="cuda")
        ids = make_ids(tokens, top_k, experts, "uniform", 1).cuda()
        router = torch.rand(ids.shape, generator=generator, device="cuda")
        fused_moe_hopper(x, *tiled, router, ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe_hopper(x, *tiled, router, ids)
        wrong = 0
        for seed, kind in enumerate(ROUTINGS * 3):
            x.normal_(generator=generator)
            router.uniform_(generator=generator)
            kind = "uniform" if kind == "mapped" else kind
            ids.copy_(make_ids(tokens, top_k, experts, kind, seed))
            out.fill_(torch.nan)
            graph.replay()
            wrong += int((out != fused_moe_hopper(x, *tiled, router, ids)).sum())
        yield f"graph {tokens} tokens, {3 * len(ROUTINGS)} routings", wrong == 0, f"{wrong} differ"
    none = fused_moe_hopper(x[:0], *tiled, router[:0], ids[:0])
    yield "no tokens", none.shape == (0, hidden), str(list(none.shape))
    x[0, 5] = torch.nan
    ids = make_ids(tokens, top_k, experts, "uniform", 1).cuda()
    out = fused_moe_hopper(x, *tiled, router, ids)
    bad = out.isnan().any(1).nonzero().flatten().tolist()
    yield "NaN stays in its row", bad == [0], f"rows {bad[:5]}"


def run_group(name: str, checks: Iterator[Check], verbose: bool) -> bool:
    start, passed, count, last = time.time(), 0, 0, ""
    for check, ok, text in checks:
        count, passed, last = count + 1, passed + ok, f"{check}: {text}"
        if (not ok and count - passed <= 12) or verbose:
            print(f"  {'ok  ' if ok else 'FAIL'} {check}: {text}", flush=True)
    print(f"{name}: {passed} of {count} in {time.time() - start:.0f} s; last: {last}", flush=True)
    return count > 0 and passed == count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--only", choices=["tables", "layers", "graphs"], action="append")
    parser.add_argument("--all", action="store_true", help="print what passes too")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    groups = {"tables": tables(), "graphs": graphs()}
    groups |= {f"layers {s}": layers(s) for s in args.shape or SHAPES}
    chosen = {k: v for k, v in groups.items() if not args.only or k.partition(" ")[0] in args.only}
    passed = [run_group(k, v, args.all) for k, v in chosen.items()]
    ok = all(passed)
    print("all comparisons passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
