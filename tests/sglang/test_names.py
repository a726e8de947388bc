"""Which names a model knows, without an engine; ``test_weight_updates`` sends them to one."""

from types import SimpleNamespace

import pytest
from torch import nn

from sglang_quads.names import ModelNames

pytestmark = pytest.mark.sglang

KNOWN = {
    "a parameter": "model.layers.0.norm.weight",
    "fused by SGLang": "model.layers.1.self_attn.q_proj.weight",
    "fused in a way of its own": "model.layers.0.self_attn.q_a_proj.weight",
    "kept experts": "model.layers.1.mlp.experts.3.up_proj.weight",
    "a stack of kept experts": "model.layers.1.mlp.experts.gate_up_proj",
    "tied head": "lm_head.weight",
    "a draft model's layer": "model.layers.2.mlp.experts.3.up_proj.weight",
    "a draft model": "mtp.layers.0.self_attn.q_proj.weight",
    "rotary cache": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "of the checkpoint": "extra.in.checkpoint",
}
UNKNOWN = {
    "wrapped": ("module.model.layers.0.norm.weight", False),
    "wrapped at the end": ("model.layers.0.norm._orig_mod.weight", False),
    "without model": ("layers.0.norm.weight", False),
    "without model, short": ("norm.weight", False),
    "wrapped expert": ("module.model.layers.0.mlp.experts.3.up_proj.weight", True),
    "no such experts": ("model.layers.0.moe.experts.3.up_proj.weight", True),
    "bare experts": ("experts.3.up_proj.weight", True),
    "wrapped linear": ("module.model.layers.0.self_attn.o_proj.weight", True),
}


@pytest.fixture
def model():
    """Two layers: o_proj of the first is quantized, experts of the second are kept."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module(), nn.Module()])
    for layer in model.model.layers:
        layer.self_attn, layer.mlp, layer.norm = nn.Module(), nn.Module(), nn.LayerNorm(2)
        layer.self_attn.qkv_proj = nn.Linear(2, 2)
    first, second = model.model.layers
    second.mlp.experts = nn.Module()
    first.self_attn.o_proj = nn.Linear(2, 2)
    first.self_attn.o_proj.quads_units = ()
    model.config = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=True)
    model.quads_config = SimpleNamespace(seen={"model.layers.1.self_attn.q_proj"})
    return model


def names_of(model):
    """Of a model that has been loaded and serves."""
    names = ModelNames(model, ["model.layers.0.self_attn.o_proj.weight"])
    assert names.known("extra.in.checkpoint"), "the first load brings it"
    model.model.layers[0].self_attn.o_proj.quads_serving = True
    return names


@pytest.mark.parametrize("case", KNOWN)
def test_known(model, case):
    names = names_of(model)
    assert names.known(KNOWN[case])
    assert names.known(KNOWN[case]), "from the table"


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown(model, case):
    names = names_of(model)
    name, like_quantized = UNKNOWN[case]
    assert not names.known(name)
    assert names.like_quantized(name) == like_quantized


def test_models_that_rename(model):
    """A tower's linears may be named in any way; experts are the language model's."""
    model.config.vision_config = {}
    names = names_of(model)
    assert names.known("visual.blocks.0.self_attn.o_proj.weight")
    assert not names.known("model.language_model.layers.0.mlp.experts.3.up_proj.weight")


def test_without_tied_embeddings(model):
    model.config.tie_word_embeddings = False
    assert not names_of(model).known("lm_head.weight")
