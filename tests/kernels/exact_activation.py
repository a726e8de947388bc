"""Activation functions in float64, with the error that a float32 evaluation may have.

u = 2^-24 is half an ulp of float32 at 1. Errors are first order sums of these, taken one percent
larger for the second order:

- ``exp(-t)`` as 2^(-t log2 e): two roundings of the exponent (4 |t| u with the constant's), and the
  GPU's ex2, 2^-22 = 4u: (4 + 4 |t|) u relative.
- ``1 / (1 + e)``: the error of e counts by e / (1 + e); the sum and the division add u each.
- ``1 + erf(z)``: z has two roundings (of 1/sqrt(2) and the product), which move erf by at most
  2u * max z erf'(z) = 0.97u; erf itself is good to 2 ulp (CUDA's), below 1 that is 2u; the sum
  rounds by u. So 4u absolute, also where the sum is nearly 0: times |x| / 2, plus the last product,
  3 |x| u. (torch's erf on a CPU is a polynomial good to 1.5e-7, that is 2.5u: it may pass this.)
- A result below float32's range (exp overflows from 88.7 on) is 0: 2^-120 absolute.
"""

import torch

from quads_common.activation import Activation

U = 2.0**-24
UNDERFLOW = 2.0**-120

ACTIVATIONS_UNDER_TEST = [
    Activation(),
    Activation("silu", limit=1.5),
    Activation("swigluoai", limit=7.0),
    Activation("silu_no_mul"),
    Activation("gelu_no_mul"),
    Activation("relu2_no_mul"),
]


def exact_activation(activation: Activation, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation of y [M, 2I] or [M, I] in float64, and the error of a float32 evaluation."""
    values = y.double()
    if activation.name == "relu2_no_mul":
        result = values.clamp(min=0).square()
        error = result.abs() * U
    elif activation.name == "gelu_no_mul":
        result = 0.5 * values * torch.special.erfc(-values * 0.5**0.5)
        error = values.abs() * (3 * U)
    elif activation.name == "silu_no_mul":
        result, error = _times_sigmoid(values, values, 0)
    else:
        result, error = _gated(activation, values)
    return torch.where(y_is_nan(activation, y), torch.nan, result), error * 1.01 + UNDERFLOW


def _gated(activation: Activation, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    oai = activation.name == "swigluoai"
    gate, up = (values[..., 0::2], values[..., 1::2]) if oai else values.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if oai:
        # alpha * gate rounds once, and so do up + beta, gate * sigmoid and the product.
        alpha = torch.tensor(activation.alpha, dtype=torch.float32).double()
        result, error = _times_sigmoid(gate, alpha * gate, 1)
        factor, roundings = up + activation.beta, 3
    else:
        result, error = _times_sigmoid(gate, gate, 0)
        factor, roundings = up, 1
    error = error * factor.abs() + (result * factor).abs() * (roundings * U)
    return result * factor, error + UNDERFLOW * factor.abs()


def _times_sigmoid(
    x: torch.Tensor, t: torch.Tensor, argument_roundings: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x * sigmoid(t) and its error."""
    result = x * torch.sigmoid(t)
    exponential = 4 + (4 + argument_roundings) * t.abs()
    return result, result.abs() * U * (exponential * torch.sigmoid(-t) + 2)


def y_is_nan(activation: Activation, y: torch.Tensor) -> torch.Tensor:
    """Where a NaN in the input must show in the result."""
    if activation.name == "swigluoai":
        return y[..., 0::2].isnan() | y[..., 1::2].isnan()
    if activation.gated:
        gate, up = y.chunk(2, dim=-1)
        return gate.isnan() | up.isnan()
    return y.isnan()


def outside(got: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Which results are no rounding of any value within ``error`` of ``exact``.

    One rounding to got's dtype is monotonic, so the roundings of the two ends are the limits; that
    float64 goes through float32 on its way changes nothing, because the evaluation does too.
    """
    low, high = ((exact + sign * error).float().to(got.dtype) for sign in (-1, 1))
    wrong = ~((got >= low) & (got <= high))
    return torch.where(exact.isnan(), ~got.isnan(), wrong)
