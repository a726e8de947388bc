"""``fused_moe`` by routes: skipped slots, expert parallel, no tokens, neighbours."""

import math

import pytest
import torch

from quads_common import fused_moe, quantize
from quads_common.format import QuantizedTensor
from quads_common.moe import local_expert_ids, sum_slots
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import EXPERTS, HIDDEN, Layer, routing
from tests.common.samples import normal

ACTS = ("nvfp4", "bf16")


def experts_of(q: QuantizedTensor, index: slice) -> QuantizedTensor:
    """Some of a stack of quantized matrices."""
    return QuantizedTensor(q.packed[index], q.block_scale[index], q.global_scale[index])


def map_to_rank(rank: int, per_rank: int, experts: int) -> torch.Tensor:
    """[experts] local ids of the rank's experts, -1 elsewhere."""
    expert_map = torch.full((experts,), -1, dtype=torch.int32)
    expert_map[rank * per_rank : (rank + 1) * per_rank] = torch.arange(per_rank, dtype=torch.int32)
    return expert_map


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_skipped_slots_contribute_exact_zero(dtype, act):
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(32), routing(32, 3)
    ids[:, 1] = -1
    ids[5] = -1
    got = layer.run(x, weights, ids.to(dtype), act=act)
    layer.reference(x, weights, ids, act).check(got, "skipped slots")
    kept = layer.run(x, weights[:, [0, 2]], ids[:, [0, 2]], act=act)
    assert_same_bits(got, kept, "slot 1 skipped against slot 1 left out")
    assert (got[5] == 0).all(), f"a token without experts gave {got[5].abs().max()}"


def test_skipped_slots_ignore_their_router_weight():
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(16), routing(16, 2)
    ids[::2, 0] = -1
    poisoned = torch.where(ids < 0, math.nan, weights)
    assert_same_bits(layer.run(x, poisoned, ids), layer.run(x, weights, ids), "NaN weights")


def test_slots_are_summed_in_order():
    slots = torch.tensor([2.0**30, 1.0, -(2.0**30), 1.0]).reshape(1, 4, 1)
    assert sum_slots(slots).item() == 1.0
    assert sum_slots(slots[:, [0, 2, 1, 3]]).item() == 2.0


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_expert_parallel_ranks_sum_to_the_whole(ranks, act):
    layer = Layer(bias=True, dtype=torch.float32)
    x, (weights, ids) = layer.tokens(40), routing(40, 2)
    whole = layer.run(x, weights, ids, act=act)
    per_rank = EXPERTS // ranks
    total = torch.zeros_like(whole)
    for rank in range(ranks):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        expert_map = map_to_rank(rank, per_rank, EXPERTS)
        got = fused_moe(
            x,
            experts_of(layer.w13, mine),
            experts_of(layer.w2, mine),
            weights,
            ids,
            act=act,
            expert_map=expert_map,
            w13_bias=layer.w13_bias[mine],
            w2_bias=layer.w2_bias[mine],
        )
        remote = torch.where(expert_map[ids.long()] < 0, -1, ids)
        expected = layer.run(x, weights, remote, act=act)
        assert_same_bits(got + 0.0, expected + 0.0, f"rank {rank} of {ranks}")
        total += got
    # With two slots the order of the float32 sum does not matter.
    assert_same_bits(total + 0.0, whole + 0.0, f"sum over {ranks} ranks")


def test_288_experts_on_8_ranks_and_one_rank_without_routes():
    """36 local experts are no multiple of 16; scales are indexed by local ids alone."""
    experts, per_rank, top_k, tokens = 288, 36, 8, 12
    w13 = quantize(0.2 * normal(experts, 32, 32) * torch.rand(experts, 1, 1).bfloat16())
    w2 = quantize(0.2 * normal(experts, 32, 16, seed=1))
    x = normal(tokens, 32, dtype=torch.float32)
    weights, ids = routing(tokens, top_k, experts - per_rank)  # none on the last rank
    whole = fused_moe(x, w13, w2, weights, ids)
    total = torch.zeros_like(whole)
    magnitude = torch.zeros_like(whole)
    for rank in range(8):
        mine = slice(rank * per_rank, (rank + 1) * per_rank)
        expert_map = map_to_rank(rank, per_rank, experts)
        part = fused_moe(
            x,
            experts_of(w13, mine),
            experts_of(w2, mine),
            weights,
            ids,
            expert_map=expert_map,
        )
        if rank == 7:
            assert (part == 0).all(), f"a rank without routes gave {part.abs().max()}"
        total += part
        magnitude += part.abs()
    # Two orders of at most 8 + 8 additions, each off by half an ulp of what it adds.
    for slot in range(top_k):
        magnitude += fused_moe(x, w13, w2, weights[:, [slot]], ids[:, [slot]]).abs()
    error = (total - whole).abs()
    bound = 16 * 2.0**-24 * magnitude
    assert (error <= bound).all(), f"{error.max()} beyond {bound[error > bound].min()}"


def test_local_expert_ids():
    expert_map = torch.tensor([-1, 1, -1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 1], [3, -1], [2, 2]], dtype=torch.int32)
    assert local_expert_ids(ids, expert_map).tolist() == [[-1, 1], [0, -1], [-1, -1]]
    assert local_expert_ids(ids, None).tolist() == ids.tolist()


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("top_k", [1, 2])
def test_no_tokens(top_k, act):
    layer = Layer(bias=True)
    ids = torch.zeros(0, top_k, dtype=torch.int32)
    for options in ({}, {"expert_map": map_to_rank(0, EXPERTS, EXPERTS)}):
        got = layer.run(layer.tokens(0), torch.zeros(0, top_k), ids, act=act, **options)
        assert got.shape == (0, HIDDEN) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_all_tokens_on_one_expert(expert, tokens):
    layer = Layer(bias=True)
    x, weights = layer.tokens(tokens), torch.rand(tokens, 1)
    ids = torch.full((tokens, 1), expert)
    layer.reference(x, weights, ids).check(layer.run(x, weights, ids), f"{tokens} on {expert}")


def test_one_expert_in_several_slots_counts_several_times():
    layer = Layer(bias=True)
    x, weights = layer.tokens(8), torch.rand(8, 3)
    ids = torch.full((8, 3), 2)
    layer.reference(x, weights, ids).check(layer.run(x, weights, ids), "the same expert thrice")


@pytest.mark.parametrize("act", ACTS)
def test_no_local_expert_at_all(act):
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(5), routing(5, 2)
    got = layer.run(x, weights, torch.full_like(ids, -1), act=act)
    assert got.shape == x.shape and (got == 0).all()


def test_tokens_that_are_not_finite_stay_apart():
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(12), routing(12, 2)
    expected = layer.run(x, weights, ids)
    x[3, 9], x[8, 0] = math.nan, math.inf
    got = layer.run(x, weights, ids)
    assert got[3].isnan().all() and not got[8].isfinite().any()
    rest = [i for i in range(12) if i not in (3, 8)]
    assert_same_bits(got[rest], expected[rest], "finite tokens")


def test_token_order_and_padding_change_no_codes():
    """Each token's result stays within the bound of its own reference, wherever it stands."""
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(24), routing(24, 2)
    expected = layer.run(x, weights, ids)
    order = torch.randperm(24)
    layer.reference(x[order], weights[order], ids[order]).check(
        layer.run(x[order], weights[order], ids[order]), "another order"
    )
    padded = torch.cat([x, torch.full((8, HIDDEN), 3e4, dtype=x.dtype)])
    none = torch.full((8, 2), -1, dtype=ids.dtype)
    got = layer.run(padded, torch.cat([weights, weights[:8]]), torch.cat([ids, none]))
    assert_same_bits(got[:24], expected, "with padding rows")
    assert (got[24:] == 0).all()


def test_fused_moe_leaves_its_inputs_alone():
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(8), routing(8, 1)
    ids[2] = -1
    inputs = (x, weights, ids, layer.w13.packed, layer.w2_bias)
    before = [t.clone() for t in inputs]
    layer.run(x, weights, ids)
    layer.run(x, weights, ids, apply_router_weight_on_input=True)
    for tensor, copy in zip(inputs, before, strict=True):
        assert_same_bits(tensor, copy, "an input")


def test_gate_and_up_scales_are_one_and_experts_have_their_own():
    """Experts of amax 0.02 and 0.2, gate and up of different size within each."""
    gate, up = 0.02 * normal(2, 16, 32), 0.2 * normal(2, 16, 32, seed=1)
    w13 = quantize(torch.cat([gate, up], dim=1) * torch.tensor([1.0, 10.0]).view(2, 1, 1))
    assert w13.global_scale.shape == (2,)
    assert w13.global_scale[1] > 4 * w13.global_scale[0]
