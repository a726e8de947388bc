"""The NVFP4 quantizer that trainer, vLLM and SGLang share. Imports no engine."""

from quads_common.fingerprint import fingerprint
from quads_common.format import CONTRACT_VERSION, GlobalScaleRule, QuantizedTensor
from quads_common.gemm import linear
from quads_common.moe import fused_moe
from quads_common.options import QuadsOptions
from quads_common.placement import Placement
from quads_common.quantize import dequantize, fake_quantize, quantize

__all__ = [
    "CONTRACT_VERSION",
    "GlobalScaleRule",
    "Placement",
    "QuadsOptions",
    "QuantizedTensor",
    "dequantize",
    "fake_quantize",
    "fingerprint",
    "fused_moe",
    "linear",
    "quantize",
]
