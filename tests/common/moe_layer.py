"""A small MoE layer for tests: random experts, exact tokens, and its float64 reference."""

from collections.abc import Callable

import numpy as np
import torch

from quads_common import fused_moe, quantize
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from tests.common.reference import CheckedActivation, Interval, Matrix, moe
from tests.common.samples import normal

EXPERTS, HIDDEN, INNER = 6, 64, 48


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def swiglu(y: np.ndarray, limit: float = np.inf) -> np.ndarray:
    gate, up = np.split(y, 2, axis=1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate * sigmoid(gate) * up


def swigluoai(y: np.ndarray, limit: float = np.inf) -> np.ndarray:
    gate, up = np.minimum(y[:, 0::2], limit), np.clip(y[:, 1::2], -limit, limit)
    return (up + 1) * gate * sigmoid(1.702 * gate)


VARIANTS: dict[str, tuple[Activation, Callable[[np.ndarray], np.ndarray]]] = {
    "silu": (Activation(), swiglu),
    "silu-limit-1.5": (Activation("silu", limit=1.5), lambda y: swiglu(y, 1.5)),
    "swigluoai-limit-2": (Activation("swigluoai", limit=2.0), lambda y: swigluoai(y, 2)),
    "silu_no_mul": (Activation("silu_no_mul"), lambda y: y * sigmoid(y)),
    "relu2_no_mul": (Activation("relu2_no_mul"), lambda y: np.maximum(y, 0) ** 2),
}


class Layer:
    """Random experts, and tokens whose GEMM1 sums are exact in float32."""

    def __init__(self, variant: str = "silu", bias: bool = False, dtype=torch.bfloat16) -> None:
        self.activation, self.formula = VARIANTS[variant]
        rows = 2 * INNER if self.activation.gated else INNER
        sizes = torch.logspace(-1, 0.5, EXPERTS).view(-1, 1, 1)
        self.w13 = quantize(0.15 * sizes * normal(EXPERTS, rows, HIDDEN, dtype=torch.float32))
        self.w2 = quantize(sizes * normal(EXPERTS, HIDDEN, INNER, seed=1, dtype=torch.float32))
        self.w13_bias = normal(EXPERTS, rows, seed=2, dtype=dtype) if bias else None
        self.w2_bias = normal(EXPERTS, HIDDEN, seed=3, dtype=dtype) if bias else None
        self.dtype = dtype

    def tokens(self, count: int) -> torch.Tensor:
        """[count, HIDDEN] multiples of 1/8 up to 2, so that unquantized sums are exact too."""
        return (normal(count, HIDDEN, seed=4).clamp(-2, 2) * 8).round().div(8).to(self.dtype)

    def run(self, x, weights, ids, **options) -> torch.Tensor:
        options = {"activation": self.activation, "act": "nvfp4", **options}
        biases = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return fused_moe(x, self.w13, self.w2, weights, ids, **{**biases, **options})

    def reference(self, x, weights, ids, act: str = "nvfp4") -> Interval:
        w13, w2 = matrices(self.w13, self.w13_bias), matrices(self.w2, self.w2_bias)
        checked = CheckedActivation(self.activation, self.formula)
        return moe(x, w13, w2, weights, ids, checked, act)


def matrices(q: QuantizedTensor, bias: torch.Tensor | None) -> list[Matrix]:
    biases = [None] * len(q.packed) if bias is None else bias
    parts = zip(q.packed, q.block_scale, q.global_scale, strict=True)
    return [Matrix.of(QuantizedTensor(*p), b) for p, b in zip(parts, biases, strict=True)]


def routing(tokens: int, top_k: int, experts: int = EXPERTS) -> tuple[torch.Tensor, torch.Tensor]:
    """Router weights that do not sum to 1, and distinct experts for each token."""
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return torch.rand(tokens, top_k) + 0.1, ids.to(torch.int32)
