"""``fingerprints``: names and digests that an engine's must equal, and a control that must not."""

import pytest
import torch
from torch import nn

from quads_common import fake_quantize, fingerprint, quantize
from quads_common.fingerprint import differing
from quads_common.qat import fingerprints, prepare_qat
from quads_common.qat.names import checkpoint_name, expert_matrix, fused_groups
from quads_common.qat.weight import prepared_weights
from tests.qat import tiny_models

PREFIX = "model.layers.0."


def test_experts_are_named_by_expert_and_matrix():
    model = prepare_qat(tiny_models.moe())
    experts = model.model.layers[0].mlp.experts
    digests = fingerprints(model)
    assert len(digests) == 2 * 8 * 2
    for e in range(8):
        for kind, stack in (("w13", experts.gate_up_proj), ("w2", experts.down_proj)):
            expected = fingerprint(quantize(stack[e].detach()))
            assert digests[f"{PREFIX}mlp.experts.{e}.{kind}"] == expected


def test_transposed_interleaved_experts_have_the_canonical_layout():
    model = prepare_qat(tiny_models.gpt_oss())
    experts = model.model.layers[0].mlp.experts
    digests = fingerprints(model)
    for e in range(4):
        gate, up = (experts.gate_up_proj[e, :, i::2].T for i in range(2))
        expected = fingerprint(quantize(torch.cat([gate, up]).detach().contiguous()))
        assert digests[f"{PREFIX}mlp.experts.{e}.w13"] == expected
        expected = fingerprint(quantize(experts.down_proj[e].detach().T.contiguous()))
        assert digests[f"{PREFIX}mlp.experts.{e}.w2"] == expected


def test_fused_linears_are_named_one_by_one_under_the_shared_scale():
    model = prepare_qat(tiny_models.dense())
    attention = model.model.layers[0].self_attn
    digests = fingerprints(model)
    assert len(digests) == 2 * 7
    weights = [getattr(attention, f"{c}_proj").weight.detach() for c in "qkv"]
    amax = torch.cat(weights).abs().max().float()
    for child, weight in zip("qkv", weights, strict=True):
        name = f"{PREFIX}self_attn.{child}_proj"
        assert digests[name] == fingerprint(quantize(weight, amax=amax)), name
    alone = attention.o_proj.weight.detach()
    assert digests[f"{PREFIX}self_attn.o_proj"] == fingerprint(quantize(alone))


class PerExpertLinears(nn.Module):
    """Experts as transformers 4 has them."""

    def __init__(self, names, count=3):
        super().__init__()
        self.experts = nn.ModuleList()
        for _ in range(count):
            sizes = [(64, 32)] * (len(names) - 1) + [(32, 64)]
            linears = {n: nn.Linear(*s, bias=False) for n, s in zip(names, sizes, strict=True)}
            self.experts.append(nn.ModuleDict(linears))


@pytest.mark.parametrize(
    "names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("up_proj", "down_proj")]
)
def test_experts_of_single_linears_have_the_same_names(names):
    torch.manual_seed(0)
    model = prepare_qat(PerExpertLinears(names))
    digests = fingerprints(model)
    assert len(digests) == 2 * 3
    for e, expert in enumerate(model.experts):
        *first, last = (expert[name].weight.detach() for name in names)
        assert digests[f"experts.{e}.w13"] == fingerprint(quantize(torch.cat(first)))
        assert digests[f"experts.{e}.w2"] == fingerprint(quantize(last))
        shared = fake_quantize(torch.cat(first)).split(32)
        for name, expected in zip(names, shared, strict=False):
            (weight,) = [w for w in prepared_weights(model) if w.name == f"experts.{e}.{name}"]
            assert torch.equal(weight.effective(), expected)


@pytest.mark.parametrize("build", [tiny_models.moe, tiny_models.dense], ids=["moe", "dense"])
def test_fp32_masters_have_the_fingerprints_of_their_bf16(build):
    master = build(torch.float32)
    assert fingerprints(prepare_qat(master)) == fingerprints(prepare_qat(build(torch.bfloat16)))


@pytest.mark.parametrize("build", [tiny_models.moe, tiny_models.dense], ids=["moe", "dense"])
def test_another_global_scale_rule_fails_the_check(build):
    """Negative control: a trainer that scales as TransformerEngine is found out, everywhere."""
    engine = fingerprints(prepare_qat(build()))
    trainer = fingerprints(prepare_qat(build(), {"global_scale_rule": "te"}))
    assert differing(engine, engine) == []
    assert differing(trainer, engine) == sorted(engine)


def test_one_changed_code_fails_the_check():
    model = prepare_qat(tiny_models.moe())
    before = fingerprints(model)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[4, 2, 3] *= -3.0
    assert differing(before, fingerprints(model)) == ["model.layers.1.mlp.experts.4.w2"]


def test_refused_without_preparation():
    with pytest.raises(ValueError, match="not prepared"):
        fingerprints(tiny_models.dense())


def test_names_of_wrapped_modules():
    name = "model._orig_mod.layers.0._checkpoint_wrapped_module.self_attn.q_proj"
    assert checkpoint_name(name) == "model.layers.0.self_attn.q_proj"
    assert expert_matrix("a.experts.12.up_proj") == "a.experts.12.w13"
    assert expert_matrix("a.experts.12.w2") == "a.experts.12.w2"
    assert expert_matrix("a.mlp.up_proj") == "a.mlp.up_proj"
    assert expert_matrix("a.shared_experts.up_proj") == "a.shared_experts.up_proj"


def test_fused_groups():
    names = ["a.k_proj", "a.q_proj", "b.q_proj", "a.o_proj", "up_proj", "gate_proj"]
    expected = [["a.q_proj", "a.k_proj"], ["b.q_proj"], ["a.o_proj"], ["gate_proj", "up_proj"]]
    assert fused_groups(names) == expected
    assert fused_groups(names, fused=[("o_proj", "k_proj")])[0] == ["a.o_proj", "a.k_proj"]
