"""Asymmetric QAT: a trainer computes with exactly the weights that a rollout serves.

Weights go through ``quads_common.quantize`` in every forward, gradients straight through to the
master weights, activations are untouched. Formula: ``y = x @ W_eff.T`` with ``W_eff =
dequantize(quantize(bf16(W)))``, ``dX = dY @ W_eff``, ``dW = dY.T @ x``.
"""

from quads_common.qat.cache import cached_quantization
from quads_common.qat.digests import fingerprints
from quads_common.qat.experts import fake_quantize_experts
from quads_common.qat.prepare import check_finite, prepare_qat, unprepare

__all__ = [
    "cached_quantization",
    "check_finite",
    "fake_quantize_experts",
    "fingerprints",
    "prepare_qat",
    "unprepare",
]
