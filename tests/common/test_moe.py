"""``fused_moe`` against float64 on the oracle's codes: rounding points, variants, biases."""

import pytest
import torch

from quads_common import fused_moe
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import EXPERTS, VARIANTS, Layer, routing
from tests.common.samples import normal

ACTS = ("nvfp4", "bf16")


def check(layer: Layer, x, weights, ids, act: str, what: str) -> None:
    layer.reference(x, weights, ids, act).check(layer.run(x, weights, ids, act=act), what)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_fused_moe_within_the_accumulation_bound(variant, act, bias):
    layer = Layer(variant, bias)
    check(layer, layer.tokens(64), *routing(64, 3), act, f"{variant} {act}")


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fused_moe_dtypes_and_top_k(dtype, top_k):
    layer = Layer(bias=True, dtype=dtype)
    x = layer.tokens(48)
    weights, ids = routing(48, top_k)
    assert layer.run(x, weights, ids).dtype == dtype
    check(layer, x, weights, ids, "nvfp4", f"{dtype} {top_k=}")


def test_fused_moe_in_float32():
    """Nothing rounds to 16 bits: the output differs from the bfloat16 model's beyond its bound."""
    layer = Layer(dtype=torch.float32)
    x, (weights, ids) = layer.tokens(32), routing(32, 2)
    check(layer, x, weights, ids, "bf16", "float32")
    narrow = layer.run(x.to(torch.bfloat16), weights, ids, act="bf16").float()
    assert (layer.run(x, weights, ids, act="bf16") - narrow).abs().max() > 1e-3


def doubled_scale(layer, x, weights, ids):
    scale = layer.w13.global_scale.clone()
    scale[2] *= 2
    layer.w13 = QuantizedTensor(layer.w13.packed, layer.w13.block_scale, scale)
    return layer.run(x, weights, ids)


CONTROLS = {
    "one-global-scale-doubled": doubled_scale,
    "activations-unquantized": lambda layer, x, w, ids: layer.run(x, w, ids, act="bf16"),
    "router-weights-twice": lambda layer, x, w, ids: layer.run(x, w * w, ids),
    "router-weights-never": lambda layer, x, w, ids: layer.run(x, torch.ones_like(w), ids),
    "experts-shifted": lambda layer, x, w, ids: layer.run(x, w, (ids + 1) % EXPERTS),
    "biases-lost": lambda layer, x, w, ids: layer.run(x, w, ids, w13_bias=None, w2_bias=None),
    "w2-bias-lost": lambda layer, x, w, ids: layer.run(x, w, ids, w2_bias=None),
    "gate-and-up-swapped": lambda layer, x, w, ids: layer.run(
        x, w, ids, activation=Activation("swigluoai", alpha=1.0, beta=0.0)
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_bound_notices_a_wrong_result(control):
    layer = Layer(bias=True)
    x, (weights, ids) = layer.tokens(32), routing(32, 2)
    expected = layer.reference(x, weights, ids)
    with pytest.raises(AssertionError, match="outside the bound"):
        expected.check(CONTROLS[control](layer, x, weights, ids), control)


@pytest.mark.parametrize("act", ACTS)
def test_router_weight_on_input_scales_and_rounds_x(act):
    """x is scaled, rounded to the model's dtype, then quantized; the output is not scaled again."""
    layer = Layer(bias=True)
    weights, ids = routing(64, 1)
    weights = (weights * 8).ceil() / 8
    x = layer.tokens(64)
    got = layer.run(x, weights, ids, act=act, apply_router_weight_on_input=True)
    scaled = (x.float() * weights).to(torch.bfloat16)
    expected = layer.reference(scaled, torch.ones(64, 1), ids, act)
    expected.check(got, act)
    assert_same_bits(got, layer.run(scaled, torch.ones(64, 1), ids, act=act), act)
    with pytest.raises(AssertionError, match="outside the bound"):
        layer.reference(x, weights, ids, act).check(got, "the bias is not scaled")


@pytest.mark.parametrize("top_k", [2, 3])
def test_router_weight_on_input_is_refused_for_several_experts(top_k):
    layer = Layer()
    with pytest.raises(ValueError, match=rf"apply_router_weight_on_input.*\b{top_k}\b"):
        layer.run(layer.tokens(4), *routing(4, top_k), apply_router_weight_on_input=True)


def test_fused_moe_defaults_to_w4a4_swiglu():
    layer = Layer()
    x, (weights, ids) = layer.tokens(8), routing(8, 2)
    got = fused_moe(x, layer.w13, layer.w2, weights, ids)
    assert_same_bits(got, layer.run(x, weights, ids), "defaults")


def test_clamp_comes_before_the_quantization_of_the_intermediate():
    """One token drives the clamp: unclamped, its large values would take the row's scale."""
    layer = Layer("swigluoai-limit-2", bias=True)
    x = layer.tokens(40)
    x[7] *= 64
    weights, ids = routing(40, 2)
    expected = layer.reference(x, weights, ids)
    got = layer.run(x, weights, ids)
    expected.check(got, "clamped")
    free = layer.run(x, weights, ids, activation=Activation("swigluoai"))
    assert free[7].abs().amax() > 4 * got[7].abs().amax(), "the clamp was not driven"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": (4, 48)}, r"x must be.*64.*48"),
        ({"x": (1, 4, 64)}, r"x must be.*64"),
        ({"weights": (4, 3)}, r"\[4, 3\].*\[4, 2\]"),
        ({"weights": (5, 2), "ids": (5, 2)}, r"\[5, 2\].*4"),
    ],
    ids=["hidden", "3d", "weights", "tokens"],
)
def test_fused_moe_refuses_shapes_that_do_not_fit(change, message):
    shapes = {"x": (4, 64), "weights": (4, 2), "ids": (4, 2), **change}
    with pytest.raises(ValueError, match=message):
        Layer().run(
            normal(*shapes["x"]), torch.ones(shapes["weights"]), torch.zeros(shapes["ids"]).int()
        )


def test_fused_moe_refuses_weights_that_do_not_fit():
    layer = Layer()
    x, (weights, ids) = layer.tokens(4), routing(4, 2)
    with pytest.raises(ValueError, match=r"relu2_no_mul needs w2 \[6, 64, 96\], got \[6, 64, 48\]"):
        layer.run(x, weights, ids, activation=Activation("relu2_no_mul"))
    layer.w2 = QuantizedTensor(*(t[:5] for t in vars(layer.w2).values()))
    with pytest.raises(ValueError, match=r"needs w2 \[6, 64, 48\], got \[5, 64, 48\]"):
        layer.run(x, weights, ids)


def test_fused_moe_refuses_an_unknown_act():
    layer = Layer()
    with pytest.raises(ValueError, match=r"int8.*nvfp4.*bf16"):
        layer.run(layer.tokens(2), *routing(2, 2), act="int8")
