"""What ``prepare_qat`` chooses, leaves alone and refuses; ``unprepare``; state dicts."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from quads_common import QuadsOptions
from quads_common.qat import check_finite, fingerprints, prepare_qat, unprepare
from quads_common.qat.weight import prepared_weights
from tests.common.bits import assert_same_bits
from tests.qat import tiny_models

LAYER = "model.layers.1"
ATTENTION = {f"self_attn.{c}_proj" for c in "qkvo"}
MLP = {f"mlp.{c}_proj" for c in ("gate", "up", "down")}
STACKS = {f"mlp.experts.{s}" for s in tiny_models.STACKS}


def chosen(model, layer=LAYER):
    """Parameters under QAT in one layer, without the layer's name; nothing outside of layers."""
    names = {weight.parameter_name for weight in prepared_weights(model)}
    assert all(name.startswith("model.layers.") for name in names), names
    return {n.removeprefix(f"{layer}.") for n in names if n.startswith(f"{layer}.")}


def logits(model):
    return model(input_ids=tiny_models.tokens(), use_cache=False).logits.detach()


@pytest.mark.parametrize(
    ("build", "config", "expected"),
    [
        (tiny_models.moe, None, STACKS),
        (tiny_models.gpt_oss, None, STACKS),
        (tiny_models.dense, None, {f"{m}.weight" for m in ATTENTION | MLP}),
        (tiny_models.moe, {"targets": "linear"}, {f"{m}.weight" for m in ATTENTION}),
        (tiny_models.moe, {"targets": "all"}, STACKS | {f"{m}.weight" for m in ATTENTION}),
        (tiny_models.dense, {"ignore": ["self_attn"]}, {f"{m}.weight" for m in MLP}),
        (tiny_models.dense, {"ignore": ["layers.1"]}, set()),
        (tiny_models.dense, QuadsOptions(targets=("o_proj",)), {"self_attn.o_proj.weight"}),
    ],
    ids=["moe", "gpt-oss", "dense", "linear", "all", "ignore", "ignore-layer", "pattern"],
)
def test_placement_decides(build, config, expected):
    """Never the router, norms, embeddings or lm_head."""
    assert chosen(prepare_qat(build(), config)) == expected


def test_lm_head_where_it_is_named():
    model = prepare_qat(tiny_models.dense(), {"targets": ["lm_head"]})
    assert [w.parameter_name for w in prepared_weights(model)] == ["lm_head.weight"]


def test_options_of_the_engine_apply():
    """The engine's JSON object as it is; what concerns activations makes no difference."""
    model = prepare_qat(
        tiny_models.moe(), {"quant_method": "quads_nvfp4", "act": "nvfp4", "ignore": ["layers.0"]}
    )
    assert chosen(model) == STACKS and not chosen(model, "model.layers.0")


def test_parameters_and_state_dict_stay():
    model = tiny_models.moe()
    parameters, state = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    types = {name: type(module) for name, module in model.named_modules()}
    assert prepare_qat(model, {"targets": "all"}) is model
    now = dict(model.named_parameters())
    assert list(now) == list(parameters) and all(now[n] is parameters[n] for n in now)
    assert list(model.state_dict()) == list(state)
    logits(model)
    for name, value in model.state_dict().items():
        assert_same_bits(value, state[name], name)
    for name, module in model.named_modules():
        assert isinstance(module, types[name]), name
    assert isinstance(model.model.layers[0].self_attn.q_proj, nn.Linear)


def test_saved_checkpoint_is_the_unprepared_models(tmp_path):
    model = tiny_models.moe()
    model.save_pretrained(tmp_path / "before")
    prepare_qat(model)
    logits(model)
    model.save_pretrained(tmp_path / "after")
    for file in ("model.safetensors", "config.json"):
        before, after = ((tmp_path / d / file).read_bytes() for d in ("before", "after"))
        assert before == after, file
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    assert fingerprints(prepare_qat(again)) == fingerprints(model)


def test_loaded_weights_are_quantized_anew():
    model, other = prepare_qat(tiny_models.moe()), tiny_models.moe(seed=5)
    before = logits(model)
    model.load_state_dict(other.state_dict())
    assert_same_bits(logits(model), logits(prepare_qat(other)), "logits")
    assert not torch.equal(before, logits(model))


def test_unprepare_restores_the_model():
    model = tiny_models.moe()
    types, before = [type(m) for m in model.modules()], logits(model)
    prepare_qat(model, {"targets": "all"})
    assert not torch.equal(logits(model), before)
    assert unprepare(model) is model
    assert [type(m) for m in model.modules()] == types
    assert not prepared_weights(model) and not model._forward_hooks
    assert_same_bits(logits(model), before, "logits")
    prepare_qat(unprepare(model), {"ignore": ["layers.0"]})
    assert chosen(model) == STACKS


def test_a_class_derived_since_stays_without_effect():
    """What fully_shard does: it derives a class from the prepared one."""
    model = prepare_qat(tiny_models.dense())
    linear = model.model.layers[0].self_attn.o_proj
    experts = prepare_qat(tiny_models.moe()).model.layers[0].mlp.experts
    for module in (linear, experts):
        module.__class__ = type(f"Sharded{type(module).__name__}", (type(module),), {})
    unprepare(model), unprepare(experts)
    x = torch.randn(3, 64, dtype=torch.bfloat16)
    assert_same_bits(linear(x), nn.functional.linear(x, linear.weight, linear.bias), "o_proj")
    plain = tiny_models.moe().model.layers[0].mlp.experts
    routing = torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5, dtype=torch.bfloat16)
    assert_same_bits(experts(x, *routing), plain(x, *routing), "experts")


def test_a_deep_copy_has_weights_of_its_own():
    model = prepare_qat(tiny_models.moe(), {"targets": "all"})
    before, twin = logits(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert_same_bits(logits(model), before, "original")
    assert not torch.equal(logits(twin), before)
    unprepare(twin)
    assert prepared_weights(model) and not prepared_weights(twin)


def test_what_was_done_is_logged(caplog):
    with caplog.at_level(logging.INFO, "quads_common.qat.prepare"):
        prepare_qat(tiny_models.moe())
    assert "2 expert modules and 0 linear layers" in caplog.text
    assert "9 linear layers are kept" in caplog.text


@pytest.mark.parametrize(
    ("place", "value"),
    [("gate_up_proj", "nan"), ("down_proj", "inf"), ("down_proj", "-inf")],
)
def test_nan_and_inf_raise_after_the_forward(place, value):
    model = prepare_qat(tiny_models.moe())
    name = f"model.layers.1.mlp.experts.{place}"
    with torch.no_grad():
        model.get_parameter(name)[3, 5, 7] = float(value)
    with pytest.raises(ValueError, match=rf"{name}\[3\]: NaN or Inf"):
        logits(model)
    assert all(weight.amax is None for weight in prepared_weights(model))
    with pytest.raises(
        ValueError, match=r"model\.layers\.1\.mlp\.experts\.3\.w.* holds NaN or Inf"
    ):
        fingerprints(model)
    with torch.no_grad():
        model.get_parameter(name)[3, 5, 7] = 0.0
    logits(model)


def test_check_finite_reads_the_weights_as_they_are():
    """Without a forward: for compiled models."""
    model = prepare_qat(tiny_models.gpt_oss())
    check_finite(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.gate_up_proj[2, 60, 3] = float("nan")
    with pytest.raises(
        ValueError, match=r"^model\.layers\.0\.mlp\.experts\.gate_up_proj\[2\]: NaN"
    ):
        check_finite(model)


def test_nan_in_one_of_q_k_v_names_that_one_and_poisons_all():
    model = prepare_qat(tiny_models.dense())
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight[0, 0] = float("nan")
    values = {w.name: w.effective() for w in prepared_weights(model)}
    for child in "qkv":
        assert values[f"model.layers.0.self_attn.{child}_proj"].isnan().all(), child
    assert values["model.layers.0.self_attn.o_proj"].isfinite().all()
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.k_proj\.weight: NaN"):
        logits(model)


@pytest.mark.parametrize("value", [3.4e38, 3.37e38], ids=["to-inf", "to-a-code-of-inf"])
def test_a_value_that_no_weight_may_have_raises(value):
    model = prepare_qat(tiny_models.moe(torch.float32))
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj[0, 0, 0] = value
    with pytest.raises(ValueError, match=r"down_proj\[0\]: NaN or Inf, or a magnitude above 3.35e"):
        logits(model)


class Odd(nn.Module):
    """Modules that QAT cannot take, by name."""

    def __init__(self, **modules):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def parameter_module(**shapes):
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return module


def replaced_forward():
    model = tiny_models.moe()
    experts = model.model.layers[0].mlp.experts
    experts.forward = functools.partial(type(experts).forward, experts)
    return model


def with_lora():
    model = tiny_models.moe()
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Linear(64, 8)
    return model


def tensor_parallel():
    model = tiny_models.moe()
    model._tp_size = 2
    return model


def expert_parallel():
    model = tiny_models.moe()
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    return model


class OwnForward(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


REFUSED = {
    "twice": (lambda: prepare_qat(tiny_models.moe()), None, ValueError, "prepared for QAT already"),
    "nothing": (tiny_models.dense, {"targets": "experts"}, ValueError, "choose no module of Qwen3"),
    "split": (tiny_models.dense, {"ignore": ["k_proj"]}, ValueError, "fuses"),
    "key": (tiny_models.moe, {"target": "all"}, ValueError, "unknown option 'target'"),
    "rule": (tiny_models.moe, {"global_scale_rule": "x"}, ValueError, "global_scale_rule 'x'"),
    "type": (tiny_models.moe, "all", TypeError, "got str"),
    "k": (lambda: Odd(o_proj=nn.Linear(24, 16)), None, ValueError, r"o_proj.weight .*K = 24"),
    "dtype": (
        lambda: Odd(o_proj=nn.Linear(16, 16).double()), None, TypeError, "o_proj.weight.*float64",
    ),
    "forward": (
        lambda: Odd(o_proj=OwnForward(16, 16)), None, NotImplementedError, "OwnForward has a f",
    ),
    "instance": (replaced_forward, None, NotImplementedError, "layers.0.mlp.experts: its forward"),
    "lora": (with_lora, None, NotImplementedError, "q_proj has LoRA"),
    "ep": (expert_parallel, None, NotImplementedError, r"layers\.1\.mlp\.experts holds"),
    "tp": (tensor_parallel, None, NotImplementedError, "tensor parallel"),
    "experts": (
        lambda: Odd(experts=parameter_module(weight=(4, 16, 16))),
        None, NotImplementedError, r"experts \(Module\) is to be quantized",
    ),
    "layout": (
        lambda: Odd(experts=parameter_module(gate_up_proj=(4, 32, 16), down_proj=(4, 16, 16))),
        None, NotImplementedError, "does not say how its experts lie",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_and_nothing_is_changed(case):
    build, config, error, message = REFUSED[case]
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(error, match=message):
        prepare_qat(model, config)
    assert [type(module) for module in model.modules()] == before
