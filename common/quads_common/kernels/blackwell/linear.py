"""Linears on FP4 tensor cores: ``quads_common.gemm.linear`` and ``linear_compensated``."""

import dataclasses

import torch

from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor
from quads_common.gemm import ActFormat, check_bias
from quads_common.kernels.blackwell.gemm import Fp4Config, fp4_config, grouped_gemm_fp4
from quads_common.kernels.blackwell.rows import pack_rows
from quads_common.kernels.gemm import linear_triton

__all__ = ["linear_blackwell"]


def linear_blackwell(
    x: torch.Tensor,
    weight: QuantizedTensor,
    bias: torch.Tensor | None = None,
    *,
    act: ActFormat = "nvfp4",
    compensation: InputCompensation | None = None,
    staging: Staging | None = None,
    config: Fp4Config | None = None,
) -> torch.Tensor:
    """y = round(product + bias) to x's dtype: ``linear``, or ``linear_compensated`` with lists.

    ``act="bf16"`` is ``linear_triton``: FP4 tensor cores take no unquantized activations.
    compensation, staging: W4A4 only. config: default by the number of rows.
    """
    if act != "nvfp4":
        if compensation is not None or staging is not None:
            raise ValueError(f"compensation is for act='nvfp4', not for {act!r}")
        return linear_triton(x, weight, bias, act=act)
    if len(weight.shape) != 2 or weight.per_token:
        raise ValueError(f"weight must be one [N, K] matrix, got {list(weight.shape)}")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K = {x.shape[-1]}, the weight has K = {weight.shape[-1]}")
    check_bias("bias", bias, weight.shape[:1])
    rows = x.reshape(-1, x.shape[-1])
    lists = compensation or InputCompensation()
    if lists.columns is not None:
        lists = dataclasses.replace(lists, columns=lists.columns.unsqueeze(0))
    stacked = QuantizedTensor(
        weight.packed.unsqueeze(0), weight.block_scale.unsqueeze(0), weight.global_scale.reshape(1)
    )
    packed = pack_rows(rows, lists, staging=staging)
    config = config or fp4_config(len(rows), packed.width, packed.has_residual)
    y = x.new_empty((rows.shape[0], weight.shape[0]))
    grouped_gemm_fp4(packed, stacked, y, config=config, compensation=lists, bias=bias)
    return y.reshape(*x.shape[:-1], weight.shape[0])
