"""Which names a model knows, without an engine; ``test_weight_updates`` sends them to one."""

from types import SimpleNamespace

import pytest
from torch import nn

from sglang_quads.names import ModelNames

pytestmark = pytest.mark.sglang

KNOWN = {
    "a parameter": "model.layers.0.norm.weight",
    "kept experts": "model.layers.1.mlp.experts.3.up_proj.weight",
    "a bias of a quantized linear": "model.layers.0.self_attn.o_proj.bias",
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
    "inside a quantized linear": ("model.layers.0.self_attn.o_proj.base_layer.weight", True),
    "a quantized linear's other tensor": ("model.layers.0.self_attn.o_proj.weight_orig", True),
    "a quantized linear itself": ("model.layers.0.self_attn.o_proj", True),
    "more kept experts": ("model.layers.1.mlp.experts.4.up_proj.weight", True),
    "kept experts, mistyped": ("model.layers.1.mlp.experts.3.up_prj.weight", True),
}
# Their modules are in the model, or what SGLang may fuse them into.
DOUBTFUL = {
    "fused by SGLang": "model.layers.1.self_attn.q_proj.weight",
    "fused in a way of its own": "model.layers.0.self_attn.q_a_proj.weight",
    "mistyped": "model.layers.0.norm.wieght",
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
    first.self_attn.o_proj.quads_names = ["model.layers.0.self_attn.o_proj.weight"]
    model.config = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=True)
    model.quads_config = SimpleNamespace(seen={"model.layers.1.self_attn.q_proj"})
    return model


def names_of(model, *first, checkpoint=True):
    """Of a model that has been loaded and serves. first: other names of its checkpoint."""
    quantized = model.model.layers[0].self_attn.o_proj
    quantized.quads_serving = False
    linears, experts = ["model.layers.0.self_attn.o_proj.weight"], {"model.layers.1.mlp.experts": 4}
    names = ModelNames(model, linears, experts)
    for name in ("extra.in.checkpoint", *first) if checkpoint else ():
        assert names.judge(name) == "known", "the first load brings it"
    quantized.quads_serving = True
    return names


@pytest.mark.parametrize("case", KNOWN)
def test_known(model, case):
    names = names_of(model)
    assert names.judge(KNOWN[case]) == "known"
    assert names.judge(KNOWN[case]) == "known", "from the table"


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown(model, case):
    names = names_of(model)
    name, like_quantized = UNKNOWN[case]
    assert names.judge(name) == ("quantized" if like_quantized else "unknown")


@pytest.mark.parametrize("case", DOUBTFUL)
def test_doubtful(model, case):
    """Certain only where no checkpoint told which names there are."""
    assert names_of(model).judge(DOUBTFUL[case]) == "doubtful"
    assert names_of(model, checkpoint=False).judge(DOUBTFUL[case]) == "known"


def test_names_of_experts(model):
    experts = "model.layers.1.mlp.experts"
    assert not names_of(model).takes_experts_alone(experts), "the checkpoint named them otherwise"
    assert names_of(model, checkpoint=False).takes_experts_alone(experts)
    names = names_of(model, f"{experts}.0.gate_proj.weight")
    assert names.takes_experts_alone(experts)


def test_models_that_rename(model):
    """A tower's linears may be named in any way; experts are the language model's."""
    model.config.vision_config = {}
    names = names_of(model)
    assert names.judge("visual.blocks.0.self_attn.o_proj.weight") == "known"
    assert names.judge("model.language_model.layers.0.mlp.experts.3.up_proj.weight") == "quantized"


def test_without_tied_embeddings(model):
    model.config.tie_word_embeddings = False
    assert names_of(model).judge("lm_head.weight") == "unknown"
