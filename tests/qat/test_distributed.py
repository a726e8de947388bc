"""FSDP2 and split experts on two CPU ranks give the bytes that one rank gives."""

import pytest
import torch

from quads_common import fake_quantize, fingerprint, quantize
from quads_common.qat import fingerprints, prepare_qat
from tests.common.bits import assert_same_bits
from tests.qat import ranks, tiny_models

SCENARIOS = ("fsdp-moe", "fsdp-dense-mixed", "fsdp-prepared-after")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return ranks.run(tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone():
    """The scenario ``fsdp-moe`` without sharding."""
    return ranks.train(prepare_qat(tiny_models.moe(torch.float32)))


def same(got, expected, what):
    assert got.keys() == expected.keys(), what
    for name in got:
        assert_same_bits(got[name], expected[name], f"{what} {name}")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rank_has_the_same_bytes(results, scenario):
    first, second = (result[scenario]["steps"] for result in results)
    for step, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a["effective"], "nothing was recorded"
        same(a["effective"], b["effective"], f"step {step}")
        assert a["fingerprints"] == b["fingerprints"]


def test_fsdp_equals_one_rank(results, alone):
    """FP32 masters: effective weights, gradients and fingerprints, before and after a step."""
    sharded = results[0]["fsdp-moe"]
    assert sharded["keys"] == alone["keys"]
    for step, (got, expected) in enumerate(zip(sharded["steps"], alone["steps"], strict=True)):
        for part in ("state", "effective", "gradients"):
            same(got[part], expected[part], f"step {step} {part}")
        assert got["fingerprints"] == expected["fingerprints"]
    assert alone["steps"][0]["fingerprints"] != alone["steps"][1]["fingerprints"]


def test_fsdp_mixed_precision_quantizes_the_rounded_master(results):
    """Gathered in BF16, a shared q, k, v scale: what ``quantize`` makes of the full FP32 master."""
    prefix = "model.layers.1.self_attn."
    for step in results[0]["fsdp-dense-mixed"]["steps"]:
        for children in (("q_proj", "k_proj", "v_proj"), ("o_proj",)):
            names = [f"{prefix}{child}.weight" for child in children]
            masters = [step["state"][name] for name in names]
            assert {m.dtype for m in masters} == {torch.float32}
            for name, value in zip(names, tiny_models.decoded(masters), strict=True):
                assert step["effective"][name].dtype == torch.bfloat16
                assert_same_bits(step["effective"][name].float(), value, name)


def test_fsdp_fingerprints_are_those_of_the_gathered_state(results):
    for step in results[0]["fsdp-dense-mixed"]["steps"]:
        model = tiny_models.dense(torch.float32)
        model.load_state_dict(step["state"])
        assert fingerprints(prepare_qat(model)) == step["fingerprints"]


def test_fsdp_refuses_a_scale_that_is_shared_across_units(results):
    for result in results:
        assert "layers.0.self_attn.q_proj.weight" in result["split-group"]
        assert "into one unit" in result["split-group"]


def test_check_finite_looks_at_each_ranks_shard(results):
    assert results[0]["finite"] == ""
    assert results[1]["finite"].startswith("model.layers.1.mlp.experts.down_proj[2]: NaN")


@pytest.mark.parametrize("way", ["in place", "returned"])
def test_amax_hook_of_tensor_parallel_experts(results, way):
    w13, w2 = ranks.expert_weights()
    parts = [result["tensor-parallel"][way] for result in results]
    halves = [[p["w13"].chunk(2, dim=1)[i] for p in parts] for i in range(2)]
    assert_same_bits(torch.cat([*halves[0], *halves[1]], dim=1), fake_quantize(w13), "w13")
    assert_same_bits(torch.cat([p["w2"] for p in parts], dim=2), fake_quantize(w2), "w2")
    for part in parts:
        assert_same_bits(part["d13"], 2 * part["w13"], "gradient of w13")
        assert_same_bits(part["d2"], 2 * part["w2"], "gradient of w2")


def test_tensor_parallel_experts_need_the_hook(results):
    """The control of the test above: a rank's own amax gives other values."""
    w13, _ = ranks.expert_weights()
    gate, up = (half.chunk(ranks.WORLD, dim=1)[0] for half in fake_quantize(w13).chunk(2, dim=1))
    without = results[0]["tensor-parallel"]["no hook"]["w13"]
    assert not torch.equal(without, torch.cat([gate, up], dim=1))


def test_expert_parallel_experts_need_none(results):
    w13, w2 = ranks.expert_weights()
    got = [result["expert-parallel"] for result in results]
    assert_same_bits(torch.cat([g["w13"] for g in got]), fake_quantize(w13), "w13")
    assert_same_bits(torch.cat([g["w2"] for g in got]), fake_quantize(w2), "w2")
    digests = [fingerprint(quantize(m)) for m in torch.cat([g["w2"] for g in got])]
    assert len(set(digests)) == ranks.EXPERTS
