"""One decision for engines, trainer and export, on the names that went wrong elsewhere."""

from types import SimpleNamespace

import pytest

from quads_common import Placement
from quads_common.placement import TARGETS, ModelFacts

MOE = ModelFacts(has_experts=True, num_hidden_layers=4)
DENSE = ModelFacts(has_experts=False, num_hidden_layers=4)
LAYER = "model.layers.0."

EXPERTS = [
    LAYER + "mlp.experts",
    LAYER + "mlp.experts.7.gate_proj",
    LAYER + "mlp.experts.7.down_proj",
    LAYER + "mlp.experts.gate_up_proj",
    LAYER + "block_sparse_moe.experts.3.w2",
    LAYER + "feed_forward.experts",
    "model.language_model.layers.3.mlp.experts",
]
LINEARS = [
    LAYER + "self_attn.q_proj",
    LAYER + "self_attn.o_proj",
    LAYER + "mlp.gate_proj",
    LAYER + "mlp.up_proj",
    LAYER + "mlp.down_proj",
    LAYER + "self_attn.gate_proj",
    "model.language_model.layers.3.self_attn.k_proj",
]
# Never, unless a pattern names them.
KEPT = [
    LAYER + "mlp.gate",
    LAYER + "block_sparse_moe.gate",
    LAYER + "mlp.router",
    LAYER + "feed_forward.router",
    LAYER + "mlp.shared_expert_gate",
    LAYER + "mlp.shared_expert.gate_proj",
    LAYER + "mlp.shared_experts.down_proj",
    LAYER + "mlp.shared_experts",
    LAYER + "feed_forward.shared_expert.up_proj",
    LAYER + "input_layernorm",
    LAYER + "self_attn.q_norm",
    "model.norm",
    "lm_head",
    "language_model.lm_head",
    "model.embed_tokens",
    "transformer.wte",
    "model.layers.4.mlp.experts",
    "model.layers.4.self_attn.q_proj",
    "model.layers.4.eh_proj",
    "mtp.layers.0.mlp.experts",
    "model.mtp.layers.0.self_attn.q_proj",
    "model.nextn.mlp.experts",
    "visual.blocks.0.attn.qkv",
    "vision_tower.encoder.layers.0.mlp.fc1",
]


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(
    ("target", "quantized"), [("auto", True), ("experts", True), ("linear", False), ("all", True)]
)
def test_decide_experts(target, quantized, name):
    assert Placement((target,)).decide(name, MOE) is quantized


@pytest.mark.parametrize("name", LINEARS)
@pytest.mark.parametrize(
    ("target", "facts", "quantized"),
    [
        ("auto", MOE, False),
        ("auto", DENSE, True),
        ("experts", MOE, False),
        ("linear", MOE, True),
        ("linear", DENSE, True),
        ("all", MOE, True),
    ],
    ids=["auto-moe", "auto-dense", "experts-moe", "linear-moe", "linear-dense", "all-moe"],
)
def test_decide_linears(target, facts, quantized, name):
    assert Placement((target,)).decide(name, facts) is quantized


@pytest.mark.parametrize("facts", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", KEPT)
def test_decide_keeps_what_no_pattern_names(name, target, facts):
    assert Placement((target,)).decide(name, facts) is False


@pytest.mark.parametrize("name", KEPT)
def test_decide_quantizes_what_a_pattern_names(name):
    assert Placement(("auto", name)).decide(name, MOE) is True
    assert Placement(("re:.*" + name.rsplit(".")[-1],)).decide(name, MOE) is True
    assert Placement((name,), ignore=(name,)).decide(name, MOE) is False


@pytest.mark.parametrize("target", TARGETS)
def test_decide_never_quantizes_a_module_without_a_name(target):
    """An lm_head built with the prefix "" must not become NVFP4: no, or an error."""
    try:
        assert Placement((target,)).decide("", DENSE) is False
    except ValueError as error:
        assert "name" in str(error), f"{error}"


REPORTED_IGNORE = ("lm_head", r"re:.*mlp\.gate$", r"re:.*shared_expert_gate$")


@pytest.mark.parametrize(
    ("name", "quantized"),
    [
        (LAYER + "mlp.gate", False),
        (LAYER + "mlp.gate_proj", True),
        (LAYER + "mlp.gate_up_proj", True),
        (LAYER + "mlp.shared_expert_gate", False),
        ("language_model.lm_head", False),
        ("lm_head", False),
        ("my_lm_head", True),
        (LAYER + "mlp.experts.0.down_proj", True),
    ],
    ids=lambda v: str(v),
)
def test_decide_with_the_reported_ignore_list(name, quantized):
    assert Placement(("all",), REPORTED_IGNORE).decide(name, MOE) is quantized


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("mlp.gate", LAYER + "mlp.gate", True),
        ("mlp.gate", LAYER + "mlp.gate_proj", False),
        ("gate_proj", LAYER + "mlp.gate_proj", True),
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.0", LAYER + "mlp.up_proj", True),
        ("mlp.up", LAYER + "mlp.up_proj", False),
        ("mlp up_proj", LAYER + "mlp.up_proj", False),
        ("re:mlp", LAYER + "mlp.up_proj", False),
        (r"re:.*\.up", LAYER + "mlp.up_proj", False),
        (r"re:.*\.up_proj", LAYER + "mlp.up_proj", True),
        (r"re:model\.layers\.[01]\..*", "model.layers.1.mlp.up_proj", True),
        (r"re:model\.layers\.[01]\..*", "model.layers.2.mlp.up_proj", False),
        ("mlp.*", LAYER + "mlp.up_proj", False),
    ],
    ids=str,
)
def test_patterns(pattern, name, matches):
    facts = ModelFacts(has_experts=False, num_hidden_layers=40)
    assert Placement(("all",), (pattern,)).decide(name, facts) is not matches
    assert Placement((pattern,)).decide(name, facts) is matches


QKV = [LAYER + f"self_attn.{p}_proj" for p in "qkv"]


def test_decide_group_agrees():
    assert Placement(("linear",)).decide_group(QKV, MOE) is True
    assert Placement(("experts",)).decide_group(QKV, MOE) is False
    assert Placement(("linear",), ("self_attn",)).decide_group(QKV, MOE) is False
    assert Placement(("linear",)).decide_group(iter(QKV[:1]), MOE) is True


@pytest.mark.parametrize(
    "placement",
    [Placement(("linear",), ("q_proj",)), Placement(("k_proj", "v_proj"))],
    ids=["q-ignored", "k-v-named"],
)
def test_decide_group_refuses_a_fused_layer_cut_in_two(placement):
    with pytest.raises(ValueError, match=r"targets/ignore") as error:
        placement.decide_group(QKV, MOE)
    for name in QKV:
        assert name in str(error.value), f"{name} not in {error.value}"


def test_draft_layers_start_at_num_hidden_layers():
    """One next-n layer behind 4 layers; unknown counts keep nothing by index."""
    placement = Placement(("experts",))
    decided = [placement.decide(f"model.layers.{i}.mlp.experts", MOE) for i in range(6)]
    assert decided == [True] * 4 + [False] * 2
    unknown = ModelFacts(has_experts=True)
    assert placement.decide("model.layers.99.mlp.experts", unknown) is True


@pytest.mark.parametrize(
    ("fields", "has_experts"),
    [
        ({"num_experts": 128}, True),
        ({"num_local_experts": 8}, True),
        ({"n_routed_experts": 256}, True),
        ({"num_experts": 0}, False),
        ({"num_experts": 1}, False),
        ({"num_experts": None}, False),
        ({}, False),
    ],
    ids=str,
)
def test_facts_from_hf_config(fields, has_experts):
    config = SimpleNamespace(num_hidden_layers=12, **fields)
    for c in (config, SimpleNamespace(text_config=config, num_hidden_layers=99)):
        assert ModelFacts.from_hf_config(c) == ModelFacts(has_experts, 12)


@pytest.mark.parametrize("key", ["targets", "ignore"])
@pytest.mark.parametrize("pattern", ["re:(", "re:*", "", 7, None], ids=repr)
def test_placement_refuses_what_is_no_pattern(pattern, key):
    with pytest.raises(ValueError, match=key) as error:
        Placement(**{"targets": ("auto",), "ignore": (), key: (pattern,)})
    assert repr(pattern) in str(error.value), f"{error.value}"


def test_placement_refuses_empty_targets():
    with pytest.raises(ValueError, match=r"targets.*auto.*experts.*linear.*all"):
        Placement(())


@pytest.mark.parametrize("name", ["Qwen3OmniMoeConfig", "DbrxConfig", "Qwen3MoeConfig"])
def test_facts_of_nested_configurations(name):
    """Experts are found wherever transformers keeps the text model's numbers."""
    config = getattr(pytest.importorskip("transformers"), name)()
    assert ModelFacts.from_hf_config(config).has_experts


def test_facts_of_a_dense_configuration():
    config = pytest.importorskip("transformers").Qwen3Config(num_hidden_layers=3)
    assert ModelFacts.from_hf_config(config) == ModelFacts(has_experts=False, num_hidden_layers=3)


def test_unmatched_patterns():
    placement = Placement(("auto", "q_proj", "re:.*\\.lm"), ("mlp.gate", "layers.9"))
    names = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.gate"]
    assert placement.unmatched("targets", names) == ["re:.*\\.lm"]
    assert placement.unmatched("ignore", names) == ["layers.9"]
