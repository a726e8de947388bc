"""The layers as opaque ``torch.library`` operators, for every graph compiler that meets them.

Inductor would elide the roundings to bfloat16 and contract multiply-adds inside the quantizer, so no
compiled graph may look into it. Import this module once per process before tracing.
"""

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.gemm import linear
from quads_common.moe import fused_moe

__all__ = ["quads_linear", "quads_moe"]


@torch.library.custom_op("quads::linear", mutates_args=())
def quads_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    act: str,
) -> torch.Tensor:
    """See ``quads_common.gemm.linear``. global_scale: one element, any shape."""
    weight = QuantizedTensor(packed, block_scale, global_scale.reshape(()))
    return linear(x, weight, bias, act=act)  # type: ignore[arg-type]  # checked in linear


@quads_linear.register_fake
def _(x, packed, block_scale, global_scale, bias, act):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("quads::moe", mutates_args=())
def quads_moe(
    x: torch.Tensor,
    w13_packed: torch.Tensor,
    w13_block_scale: torch.Tensor,
    w13_global_scale: torch.Tensor,
    w2_packed: torch.Tensor,
    w2_block_scale: torch.Tensor,
    w2_global_scale: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    activation: str,
    limit: float | None,
    act: str,
    apply_router_weight_on_input: bool,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe``."""
    return fused_moe(
        x,
        QuantizedTensor(w13_packed, w13_block_scale, w13_global_scale),
        QuantizedTensor(w2_packed, w2_block_scale, w2_global_scale),
        topk_weights,
        topk_ids,
        activation=Activation(activation, limit),
        act=act,  # type: ignore[arg-type]  # checked in scaled_operand
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )


@quads_moe.register_fake
def _(x, *args):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)
