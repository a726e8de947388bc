"""Shards of ranks, put together, are what one rank quantizes; loaders refuse what does not fit."""

import threading

import pytest
import torch
from torch import nn

from quads_common.fingerprint import combine_ranks, differing, fingerprint
from quads_common.layer_weights import (
    WeightsLostError,
    add_quantized_weight,
    drop_open,
    mark_lost,
    partial_fingerprints,
    raise_if_lost,
    weight_counts,
)
from quads_common.quantize import quantize
from quads_common.shards import (
    ExpertLoader,
    ExpertShards,
    LinearLoader,
    LinearPart,
    linear_regions,
)

H, INNER, EXPERTS = 64, 96, 4


def linear(parts, k, full_k, k_rank, names):
    """A module with a quantized weight and its loader."""
    layer = nn.Module()
    regions = linear_regions(names, parts, k, full_k, k_rank)
    rows = sum(part.rows for part in parts.values())
    units = add_quantized_weight(
        layer, "weight", (rows, k), "linear", list(parts), lambda unit: regions, "pow2"
    )
    layer.quads_units = (units,)
    return layer, LinearLoader(units, parts, full_k, k_rank)


def qkv_rank(rank, ranks=4):
    """Eight query heads over four ranks, two kv heads: two ranks hold the same ones."""
    kv = rank // 2
    parts = {
        "q": LinearPart(32, 128, rank),
        "k": LinearPart(16, 32, kv),
        "v": LinearPart(16, 32, kv),
    }
    return linear(parts, H, H, 0, ["a.q_proj", "a.k_proj", "a.v_proj"])


@pytest.fixture
def qkv():
    """Full tensors with amaxima of different ranks and parts."""
    tensors = {n: torch.randn(rows, H).bfloat16() for n, rows in (("q", 128), ("k", 32), ("v", 32))}
    tensors["k"][31, 5] = 40.0
    return tensors


def test_qkv_of_four_ranks(qkv):
    ranks = []
    for rank in range(4):
        layer, loader = qkv_rank(rank)
        for part in ("v", "q", "k"):
            loader.load(qkv[part], part)
        assert loader.calls == 3
        ranks.append(partial_fingerprints(layer))
    amax = torch.stack([t.abs().amax() for t in qkv.values()]).amax().float()
    expected = {f"a.{n}_proj": fingerprint(quantize(t, amax=amax)) for n, t in qkv.items()}
    assert not differing(expected, combine_ranks(ranks))


def test_parts_that_come_stacked(qkv):
    """Fused in the checkpoint, or several shard ids in one call."""
    for ids in (None, ("q", "k", "v")):
        layer, loader = qkv_rank(1)
        loader.load(torch.cat(list(qkv.values())), ids)
        other, one_by_one = qkv_rank(1)
        for part, tensor in qkv.items():
            one_by_one.load(tensor, part)
        assert partial_fingerprints(layer) == partial_fingerprints(other)


def test_one_name_for_a_fused_group():
    """A checkpoint that holds gate and up as one tensor."""
    full = torch.randn(2 * INNER, H).bfloat16()
    ranks = []
    for rank in range(2):
        parts = {str(i): LinearPart(INNER // 2, INNER, rank) for i in range(2)}
        layer, loader = linear(parts, H, H, 0, ["mlp.gate_up_proj"])
        loader.load(full)
        ranks.append(partial_fingerprints(layer))
    assert combine_ranks(ranks) == {"mlp.gate_up_proj": fingerprint(quantize(full))}


def test_columns_of_two_ranks():
    full = torch.randn(48, 128).bfloat16()
    full[3, 100] = 30.0  # the amax is on rank 1
    ranks = []
    for rank in range(2):
        layer, loader = linear({"weight": LinearPart(48, 48, 0)}, 64, 128, rank, ["o_proj"])
        loader.load(full.float())
        ranks.append(partial_fingerprints(layer))
    assert combine_ranks(ranks) == {"o_proj": fingerprint(quantize(full))}


def test_what_a_linear_refuses(qkv):
    _, loader = qkv_rank(0)
    with pytest.raises(
        ValueError, match=r"linear \(q\): expected shape \[128, 64\], got \[32, 64\]"
    ):
        loader.load(qkv["k"], "q")
    with pytest.raises(ValueError, match=r"shard id 'x' is not one of \['q', 'k', 'v'\]"):
        loader.load(qkv["k"], "x")
    with pytest.raises(TypeError, match=r"got torch\.int8"):
        loader.load(torch.zeros(128, H, dtype=torch.int8), "q")


def experts(rank=0, tp_size=1, ids=tuple(range(EXPERTS)), gated=True):
    """A module with quantized experts and its loader."""
    shards = ExpertShards(
        "x.experts", EXPERTS, ids, H, INNER // tp_size, gated, tp_rank=rank, tp_size=tp_size
    )
    layer = nn.Module()
    w13 = add_quantized_weight(
        layer, "w13_weight", (len(ids), shards.w13_rows, H), "x.w13", shards.w13_parts,
        shards.w13_regions, "pow2",
    )  # fmt: skip
    w2 = add_quantized_weight(
        layer, "w2_weight", (len(ids), H, shards.inner), "x.w2", ("w2",), shards.w2_regions, "pow2"
    )
    layer.quads_units = (w13, w2)
    return layer, ExpertLoader(shards, w13, w2)


@pytest.fixture
def stacks():
    """w13 [E, 2I, H] and w2 [E, H, I]."""
    w13, w2 = torch.randn(EXPERTS, 2 * INNER, H), torch.randn(EXPERTS, H, INNER)
    return w13.bfloat16(), w2.bfloat16()


def expected_of(w13, w2):
    found = {f"x.experts.{e}.w13": fingerprint(quantize(t)) for e, t in enumerate(w13)}
    return found | {f"x.experts.{e}.w2": fingerprint(quantize(t)) for e, t in enumerate(w2)}


LAYOUTS = {
    "one rank": [{}],
    "tensor parallel": [{"rank": r, "tp_size": 2} for r in range(2)],
    "expert parallel": [{"ids": (0, 1)}, {"ids": (2, 3)}],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_of_ranks(stacks, layout):
    """Stacked and one by one give the same bytes in every layout."""
    w13, w2 = stacks
    ranks = []
    for options in LAYOUTS[layout]:
        layer, loader = experts(**options)
        loader.load_stack(w13, "w13", "x.experts.gate_up_proj")
        loader.load_stack(w2, "w2", "x.experts.down_proj")
        other, one_by_one = experts(**options)
        for e in range(EXPERTS):
            mine = e in one_by_one.local_ids
            assert one_by_one.load(w2[e], "w2", e) == mine
            assert one_by_one.load(w13[e, INNER:], "w3", e) == mine
            assert one_by_one.load(w13[e, :INNER], "w1", e) == mine
        assert loader.calls == one_by_one.calls == 3 * EXPERTS
        assert partial_fingerprints(layer) == partial_fingerprints(other)
        ranks.append(partial_fingerprints(layer))
    assert not differing(expected_of(w13, w2), combine_ranks(ranks))


def test_experts_without_gate(stacks):
    w13, w2 = stacks[0][:, :INNER], stacks[1]
    layer, loader = experts(gated=False)
    loader.load_stack(w13, "w13", "up")
    loader.load_stack(w2, "w2", "down")
    assert not differing(expected_of(w13, w2), combine_ranks([partial_fingerprints(layer)]))
    with pytest.raises(ValueError, match="shard id 'w3' is not one of"):
        loader.load(w13[0], "w3", 0)


def test_loading_in_threads(stacks):
    """Some models of SGLang load each tensor in a thread of its own."""
    w13, w2 = stacks
    layer, loader = experts()
    calls = [(w13[e, :INNER], "w1", e) for e in range(EXPERTS)]
    calls += [(w13[e, INNER:], "w3", e) for e in range(EXPERTS)]
    calls += [(w2[e], "w2", e) for e in range(EXPERTS)]
    threads = [threading.Thread(target=loader.load, args=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing(expected_of(w13, w2), combine_ranks([partial_fingerprints(layer)]))


def test_what_experts_refuse(stacks):
    _, loader = experts()
    with pytest.raises(ValueError, match=r"x\.experts\.1\.w1: expected shape \[96, 64\]"):
        loader.load(stacks[1][1], "w1", 1)
    with pytest.raises(ValueError, match=r"down: expected 4 experts, got shape \[3, 64, 96\]"):
        loader.load_stack(stacks[1][:3], "w2", "down")
    with pytest.raises(ValueError, match=r"up: expected shape \[4, 192, 64\], got \[4, 64, 96\]"):
        loader.load_stack(stacks[1], "w13", "up")
    with pytest.raises(ValueError, match="intermediate size 96 over tensor parallel size 4 leaves"):
        experts(tp_size=4)


def test_a_model_s_weights(stacks):
    """Counts, boundaries and lost weights of a whole model."""
    layer, loader = experts()
    model = nn.ModuleDict({"experts": layer, "kept": nn.Linear(H, 8, bias=False)})
    loader.load_stack(stacks[0], "w13", "up")
    loader.load(stacks[1][0], "w2", 0)
    counts = weight_counts(model, lambda module: isinstance(module, nn.Linear))
    assert (counts["layers_quantized"], counts["layers_kept"]) == (1, 1)
    elements, kept = EXPERTS * 3 * INNER * H, H * 8 * 4
    assert counts["bytes_before"] == 2 * elements + kept
    assert counts["bytes_after"] == elements // 2 + elements // 16 + 2 * EXPERTS * 4 + kept

    warnings = []
    loader.load(stacks[0][2, :INNER], "w1", 2)
    dropped = drop_open(layer.quads_units, warnings.append)
    assert warnings == [f"Incomplete weight update: {dropped[0]}"]
    assert "x.w13[2]: got ['x.experts.2.w1'], never got ['w3']" in dropped[0]
    mark_lost(model)
    with pytest.raises(WeightsLostError, match=r"no weights since a nap discarded them: x\.w13\["):
        raise_if_lost(model, "a nap")
    loader.load_stack(stacks[0], "w13", "up")
    loader.load_stack(stacks[1], "w2", "down")
    raise_if_lost(model, "a nap")


def test_what_came_since_is_dropped(stacks):
    """Halves that were there before, and that nothing touched since, stay open."""
    layer, loader = experts()
    units = layer.quads_units[0]
    gate = stacks[0][:, :INNER]
    for expert in (0, 1, 2):
        loader.load(gate[expert], "w1", expert)
    then = units.now
    loader.load(gate[1], "w1", 1)  # again
    loader.load(gate[3], "w1", 3)
    dropped = units.drop_since(then)
    assert [text.split(":")[0] for text in dropped] == ["x.w13[1]", "x.w13[3]"]
    assert units.drop_since(then) == []
    assert [text.split(":")[0] for text in units.drop_open()] == ["x.w13[0]", "x.w13[2]"]


def test_a_shard_that_cuts_a_block_is_refused():
    """intermediate size 96 over 4 ranks leaves 24: one and a half blocks."""
    sizes = {"experts": 2, "global_ids": (0, 1), "hidden": 256, "gated": True, "tp_rank": 0}
    message = r"layer\.experts: intermediate size 96 over tensor parallel size 4 leaves 24 per rank"
    with pytest.raises(ValueError, match=message):
        ExpertShards("layer.experts", inner=24, tp_size=4, **sizes)
    ExpertShards("layer.experts", inner=48, tp_size=2, **sizes)
