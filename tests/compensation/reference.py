"""RAC and splice in float64, written from the formulas, on the oracle's codes.

x_cold = x without the hot channels;  q, g = quantize(x_cold)
r = x_cold - q * g  (float32);        q_r = quantize(r) with the same g, in the chosen blocks
plain, RAC:             y = (q + alpha * q_r) @ W.T * (g * s_w)
splice, FP4 columns:    y = s_w * (g * ((q + alpha * q_r) @ W.T) + x_hot @ W_hot.T)
splice, BF16 columns:   y = (q + alpha * q_r) @ W.T * (g * s_w) + x_hot @ B.T
"""

from dataclasses import dataclass, field

import numpy as np
import torch

from tests.common import oracle
from tests.common.reference import (
    ULP,
    CheckedActivation,
    Interval,
    Matrix,
    gamma,
    lowest_bit,
    round_to,
    unscaled,
)

F32 = np.float32


@dataclass(frozen=True)
class Lists:
    """Blocks with a residual (None: no RAC), hot channels, BF16 columns [N, len(hot)] or None."""

    blocks: list[int] | None = None
    hot: list[int] = field(default_factory=list)
    columns: np.ndarray | None = None
    alpha: float = 1.0


@dataclass(frozen=True)
class Encoded:
    """float64 [M, K] unscaled operands, float64 hot values [M, C], float32 row scale [M, 1]."""

    q: np.ndarray
    q_r: np.ndarray
    hot: np.ndarray
    scale: np.ndarray
    residual: np.ndarray


def encode(x: np.ndarray, lists: Lists) -> Encoded:
    """x: finite float32 [M, K]."""
    cold = x.copy()
    cold[:, lists.hot] = 0
    amax = np.abs(cold).max(axis=1, keepdims=True, initial=0)
    first = oracle.quantize_tokens(cold)
    q = unscaled(first.packed, first.scale_bytes)
    residual = cold - q.astype(F32) * first.global_scale
    assert residual.dtype == F32
    tiny = amax.astype(np.float64) < 1e-30
    inverse = np.where(tiny, F32(1), F32(2688) / np.where(tiny, F32(1), amax)).astype(F32)
    second = unscaled(*oracle._quantize_blocks(residual, inverse))
    chosen = np.zeros(x.shape[1], bool)
    for block in lists.blocks or []:
        chosen[16 * block : 16 * block + 16] = True
    q_r = np.where(chosen, second, 0)
    return Encoded(q, q_r, x[:, lists.hot].astype(np.float64), first.global_scale, residual)


def linear(x: torch.Tensor, w: Matrix, lists: Lists) -> Interval:
    """The legal results of a compensated linear layer, bias included."""
    e = encode(x.float().numpy(), lists)
    return bounded(e, w, lists)


def bounded(e: Encoded, w: Matrix, lists: Lists) -> Interval:
    """Value and error of the sums and of the float32 roundings behind them."""
    operand, size = e.q + lists.alpha * e.q_r, np.abs(e.q) + lists.alpha * np.abs(e.q_r)
    scale, row = np.float64(w.scale), e.scale.astype(np.float64)
    acc, weight = operand @ w.values.T, np.abs(w.values)
    cold, error = acc * row * scale, gamma(e.q.shape[1]) * (size @ weight.T) * row * scale
    columns, factor = w.values[:, lists.hot], scale
    if lists.columns is not None:
        columns, factor = lists.columns.astype(np.float64), np.float64(1)
    hot = e.hot @ columns.T * factor
    error = error + gamma(len(lists.hot)) * (np.abs(e.hot) @ np.abs(columns).T) * factor
    value = cold + hot + w.bias
    roundings = 3 * np.abs(cold) + 2 * np.abs(hot) + np.abs(cold + hot) + np.abs(value)
    return Interval(value, error + ULP * roundings)


def exact_product(e: Encoded, w: Matrix, lists: Lists) -> np.ndarray:
    """float32 [M, N], one operation at a time, of sums that are exact in any order."""
    acc = exact_sum(e.q, w.values)
    if lists.blocks is not None:
        acc = acc + F32(lists.alpha) * exact_sum(e.q_r, w.values)
    if not lists.hot:
        y = acc * (e.scale * w.scale)
    elif lists.columns is None:
        y = w.scale * (e.scale * acc + exact_sum(e.hot, w.values[:, lists.hot]))
    else:
        y = acc * (e.scale * w.scale) + exact_sum(e.hot, lists.columns.astype(np.float64))
    return (y + w.bias if w.bias.any() else y).astype(F32)


def exact_sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b.T in float32, after a check that no order of summation rounds."""
    largest = (np.abs(a) @ np.abs(b).T).max(initial=0) / (lowest_bit(a) * lowest_bit(b))
    assert largest <= 2**24, f"float32 sums are not exact: {largest:.0f} units > 2^24"
    return (a @ b.T).astype(F32)


def moe(
    x: torch.Tensor,
    w13: list[Matrix],
    w2: list[Matrix],
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: CheckedActivation,
    w13_lists: list[Lists],
    w2_lists: list[Lists],
) -> Interval:
    """The sum over the top-k. Lists per expert; those of w13 differ in their columns only."""
    values, errors = np.zeros(x.shape), np.zeros(x.shape)
    for expert in range(len(w13)):
        token, slot = np.nonzero(ids.numpy() == expert)
        if token.size == 0:
            continue
        first = encode(x.float().numpy()[token], w13_lists[expert])
        y = round_to(exact_product(first, w13[expert], w13_lists[expert]), x.dtype)
        hidden = activation(y, x.dtype)
        second = bounded(encode(hidden, w2_lists[expert]), w2[expert], w2_lists[expert])
        router = weights.float().numpy()[token, slot].astype(np.float64)[:, None]
        terms = second.value * router
        roundings = (1 + ids.shape[1]) * ULP * np.abs(terms)
        np.add.at(values, token, terms)
        np.add.at(errors, token, second.error * np.abs(router) + roundings)
    return Interval(values, errors)
