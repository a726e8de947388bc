"""``linear`` and ``fused_moe`` in float64 on the oracle's codes, with derived error bounds.

What is quantized after a GEMM jumps where a rounding flips. So the tests of the MoE feed GEMM1
products whose float32 sums are exact in any order (checked here), and the output of the activation
function is taken from the code under test once it proved to be a legal rounding of the formula.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from quads_common.format import QuantizedTensor
from tests.common import oracle

F32 = np.float32
ULP = 2.0**-23  # of float32: twice the largest relative error of one rounding


@dataclass(frozen=True)
class Matrix:
    """A weight: float64 code * block scale [N, K], its global scale, its bias or zeros."""

    values: np.ndarray
    scale: np.float32
    bias: np.ndarray

    @classmethod
    def of(cls, q: QuantizedTensor, bias: torch.Tensor | None = None) -> "Matrix":
        packed = q.packed.numpy()
        values = unscaled(packed, q.block_scale.view(torch.uint8).numpy())
        zeros = np.zeros(len(packed), F32)
        return cls(values, F32(q.global_scale), zeros if bias is None else bias.float().numpy())


@dataclass(frozen=True)
class Interval:
    """Values that are legal results: ``value`` +- ``error`` before the last rounding."""

    value: np.ndarray
    error: np.ndarray

    def check(self, got: torch.Tensor, what: str = "") -> None:
        """``got`` lies within the interval, rounded to its dtype."""
        low, high = (
            torch.from_numpy(self.value + sign * self.error).to(got.dtype) for sign in (-1, 1)
        )
        outside = ~((got >= low) & (got <= high))
        if outside.any():
            place = tuple(outside.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {int(outside.sum())} of {outside.numel()} outside the bound, the first "
                f"at {place}: {got[place].item()!r} not in "
                f"[{low[place].item()!r}, {high[place].item()!r}]"
            )


def unscaled(packed: np.ndarray, scale_bytes: np.ndarray) -> np.ndarray:
    """float64 code * block scale, [..., K]."""
    return oracle.decode(packed, scale_bytes, np.array(1, F32)).astype(np.float64)


def operand_of(x: np.ndarray, act: str) -> tuple[np.ndarray, np.ndarray]:
    """float64 operand [M, K] and float32 row scale [M, 1] of float32 activations."""
    if act == "bf16":
        return x.astype(np.float64), np.ones((len(x), 1), F32)
    e = oracle.quantize_tokens(x)
    return unscaled(e.packed, e.scale_bytes), e.global_scale


def gamma(k: int) -> float:
    """Relative to sum |a * b|: (K/16 + 2) * 2^-22."""
    return (k / 16 + 2) * 2.0**-22


def gemm(operand: np.ndarray, row_scale: np.ndarray, w: Matrix) -> Interval:
    """acc * (g_row * s_w) + bias; error of the sum and of the three float32 roundings."""
    acc = operand @ w.values.T
    alpha = (row_scale * w.scale).astype(F32).astype(np.float64)
    magnitude = (np.abs(operand) @ np.abs(w.values).T) * np.abs(alpha)
    value = acc * alpha + w.bias
    rounding = ULP * (np.abs(acc * alpha) + np.abs(value))
    return Interval(value, gamma(operand.shape[1]) * magnitude + rounding)


def exact_gemm(operand: np.ndarray, row_scale: np.ndarray, w: Matrix) -> np.ndarray:
    """The same in float32, one operation at a time, of a sum that is exact in any order."""
    unit = lowest_bit(operand) * lowest_bit(w.values)
    largest = (np.abs(operand) @ np.abs(w.values).T).max(initial=0) / unit
    assert largest <= 2**24, f"float32 sums are not exact: {largest:.0f} units > 2^24"
    acc = (operand @ w.values.T).astype(F32)
    y = acc * (row_scale * w.scale).astype(F32)
    return (y + w.bias if w.bias.any() else y).astype(F32)


def lowest_bit(x: np.ndarray) -> float:
    """The largest power of two that divides every element."""
    nonzero = x[x != 0]
    if nonzero.size == 0:
        return 1.0
    mantissa, exponent = np.frexp(nonzero)
    integer = np.abs(mantissa * 2.0**53).astype(np.int64)
    return float((2.0 ** (exponent - 53) * (integer & -integer)).min())


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float32 or float64 to the model's dtype; keeps it as float32."""
    return torch.from_numpy(x).to(dtype).float().numpy()


@dataclass(frozen=True)
class CheckedActivation:
    """The activation of the code under test, and its formula in float64 to hold it to."""

    function: Callable[[torch.Tensor], torch.Tensor]
    formula: Callable[[np.ndarray], np.ndarray]

    def __call__(self, y: np.ndarray, dtype: torch.dtype) -> np.ndarray:
        """float32 [n, rows of w13] in ``dtype`` to float32 [n, I]: one rounding of the formula."""
        got = self.function(torch.from_numpy(y).to(dtype))
        value = self.formula(y.astype(np.float64))
        Interval(value, 32 * ULP * np.abs(value) + 1e-30).check(got, "activation")
        return got.float().numpy()


def moe(
    x: torch.Tensor,
    w13: list[Matrix],
    w2: list[Matrix],
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: CheckedActivation,
    act: str,
) -> Interval:
    """The sum over the top-k in float64. x: [T, H] as GEMM1 gets it. ids: -1 skips a slot."""
    values, errors = np.zeros(x.shape), np.zeros(x.shape)
    operand, row_scale = operand_of(x.float().numpy(), act)
    for expert in range(len(w13)):
        token, slot = np.nonzero(ids.numpy() == expert)
        if token.size == 0:
            continue
        y = round_to(exact_gemm(operand[token], row_scale[token], w13[expert]), x.dtype)
        second = gemm(*operand_of(activation(y, x.dtype), act), w2[expert])
        router = weights.float().numpy()[token, slot].astype(np.float64)[:, None]
        terms = second.value * router
        roundings = (1 + ids.shape[1]) * ULP * np.abs(terms)  # the product and the sum over slots
        np.add.at(values, token, terms)
        np.add.at(errors, token, second.error * np.abs(router) + roundings)
    return Interval(values, errors)
