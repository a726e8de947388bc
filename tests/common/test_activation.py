"""Activation functions against float64 formulas; refusals."""

import math

import pytest
import torch

from quads_common.activation import ACTIVATIONS, Activation
from tests.common.bits import assert_same_bits
from tests.common.samples import normal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# float32 evaluation of the formulas below: a few roundings and one exp, each within 2 ulp.
FP32_ERROR = 16 * 2.0**-24


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def formula(activation: Activation, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 values, and the sum of magnitudes that their float32 error is relative to."""
    y = y.double()
    if activation.name == "relu2_no_mul":
        return y.clamp(min=0) ** 2, y**2
    if activation.name == "silu_no_mul":
        return y * sigmoid(y), y.abs() * sigmoid(y)
    if activation.name == "gelu_no_mul":
        return y * 0.5 * (1 + torch.special.erf(y / math.sqrt(2))), y.abs() * 0.5
    interleaved = activation.name == "swigluoai"
    half = y.shape[-1] // 2
    gate = y[..., 0::2] if interleaved else y[..., :half]
    up = y[..., 1::2] if interleaved else y[..., half:]
    if activation.limit is not None:
        gate = torch.minimum(gate, torch.tensor(activation.limit).double())
        up = up.clamp(-activation.limit, activation.limit)
    if interleaved:
        value = (up + activation.beta) * gate * sigmoid(activation.alpha * gate)
        # alpha * gate is itself rounded in float32 before the exponential.
        error = value.abs() * (1 + (activation.alpha * gate).abs())
        return value, error + gate.abs() * abs(activation.beta) * sigmoid(activation.alpha * gate)
    return gate * sigmoid(gate) * up, (gate * sigmoid(gate) * up).abs()


CASES = {
    "silu": Activation(),
    "silu-limit-10": Activation("silu", limit=10.0),
    "silu-limit-0.5": Activation("silu", limit=0.5),
    "swigluoai-limit-7": Activation("swigluoai", limit=7.0),
    "swigluoai": Activation("swigluoai"),
    "swigluoai-alpha-beta": Activation("swigluoai", limit=2.0, alpha=1.0, beta=0.25),
    "silu_no_mul": Activation("silu_no_mul"),
    "gelu_no_mul": Activation("gelu_no_mul"),
    "relu2_no_mul": Activation("relu2_no_mul"),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_activation_equals_the_formula(case, dtype):
    """Rounded once: within the float64 value, widened by float32's error, then rounded to dtype."""
    activation = CASES[case]
    y = 4 * normal(200, 64, dtype=dtype)
    got = activation(y)
    value, magnitude = formula(activation, y)
    error = FP32_ERROR * magnitude
    low, high = (value - error).to(dtype), (value + error).to(dtype)
    outside = (got < low) | (got > high)
    assert got.dtype == dtype and got.shape == value.shape
    assert not outside.any(), (
        f"{int(outside.sum())} of {outside.numel()} outside, the first {got[outside][0]} "
        f"not in [{low[outside][0]}, {high[outside][0]}]"
    )


@pytest.mark.parametrize("case", CASES)
def test_activation_computes_in_float32(case):
    """The bfloat16 result is the rounded float32 result: nothing is rounded in between."""
    y = 4 * normal(200, 64)
    expected = CASES[case](y.float()).to(torch.bfloat16)
    assert_same_bits(CASES[case](y), expected, case)


def test_activation_covers_every_name():
    assert {a.name for a in CASES.values()} == set(ACTIVATIONS)


def test_gate_is_clamped_from_above_only_and_up_on_both_sides():
    gate = torch.tensor([-100.0, -8.0, 8.0, 100.0]).repeat(2, 1)
    up = torch.tensor([-50.0, 50.0]).unsqueeze(1).expand(2, 4)
    got = Activation("silu", limit=7.0)(torch.cat([gate, up], dim=1))
    silu = torch.nn.functional.silu(torch.tensor([-100.0, -8.0, 7.0, 7.0]))
    assert_same_bits(got, torch.stack([silu * -7, silu * 7]), "clamped SwiGLU")


def test_swigluoai_by_hand():
    """Columns gate, up, gate, up: (up + 1) * gate * sigmoid(1.702 * gate), clamped at 7."""
    got = Activation("swigluoai", limit=7.0)(torch.tensor([[0.0, 5.0, 100.0, -100.0]]))
    assert got[0, 0].item() == 0
    assert got[0, 1].item() == pytest.approx((-7 + 1) * 7 / (1 + math.exp(-1.702 * 7)), rel=1e-6)


@pytest.mark.parametrize("name", ["silu", "swigluoai"])
def test_limit_that_nothing_reaches_changes_nothing(name):
    y = normal(50, 32)
    assert_same_bits(Activation(name, limit=100.0)(y), Activation(name)(y), name)


@pytest.mark.parametrize("case", CASES)
def test_activation_of_no_rows(case):
    got = CASES[case](torch.zeros(0, 32, dtype=torch.bfloat16))
    assert got.shape == (0, 16 if CASES[case].gated else 32) and got.dtype == torch.bfloat16


@pytest.mark.parametrize("case", CASES)
def test_activation_leaves_its_input_alone(case):
    y = 9 * normal(20, 32, dtype=torch.float32)
    before = y.clone()
    CASES[case](y)
    assert_same_bits(y, before, case)


@pytest.mark.parametrize("case", CASES)
def test_activation_keeps_rows_apart(case):
    y = normal(5, 32)
    expected = CASES[case](y)
    y[2] = math.nan
    got = CASES[case](y)
    assert got[2].isnan().all()
    assert_same_bits(got[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], "rows beside NaN")


@pytest.mark.parametrize("name", ["gelu", "relu", "SiLU", "swiglu", "", "silu_and_mul"])
def test_activation_refuses_unknown_names(name):
    with pytest.raises(ValueError, match="not supported") as error:
        Activation(name)
    for text in (repr(name), *ACTIVATIONS):
        assert text in str(error.value), f"{text} not in {error.value}"


@pytest.mark.parametrize("limit", [0.0, -7.0, math.nan], ids=str)
def test_activation_refuses_a_limit_that_is_not_positive(limit):
    with pytest.raises(ValueError, match=rf"limit must be positive.*{limit}"):
        Activation("silu", limit=limit)


@pytest.mark.parametrize("name", ["silu_no_mul", "gelu_no_mul", "relu2_no_mul"])
def test_activation_refuses_a_limit_without_a_gate(name):
    with pytest.raises(ValueError, match=rf"{name}.*7\.0"):
        Activation(name, limit=7.0)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name):
    assert Activation(name).gated == (name in ("silu", "swigluoai"))
