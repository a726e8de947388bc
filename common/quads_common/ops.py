"""The layers as opaque ``torch.library`` operators for every graph compiler that meets them.

Inductor would elide the roundings to bfloat16 and contract multiply-adds inside the quantizer, so
no compiled graph may look into it. Import this module once per process before tracing. Triton is
loaded by the first call that names the backend of that name.
"""

from collections.abc import Callable
from functools import cache

import torch

from quads_common.activation import Activation
from quads_common.format import QuantizedTensor

__all__ = ["quads_linear", "quads_moe"]


@torch.library.custom_op("quads::linear", mutates_args=())
def quads_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    act: str,
    backend: str,
) -> torch.Tensor:
    """See ``quads_common.gemm.linear``. global_scale: one element, any shape.

    backend: what ``quads_common.backend.choose_backend`` returned, for this layer
        (``general_backend``; ``moe_backend`` for ``quads_moe``).
    """
    weight = QuantizedTensor(packed, block_scale, global_scale.reshape(()))
    return _layers(backend)[0](x, weight, bias, act=act)


@quads_linear.register_fake
def _(x, packed, block_scale, global_scale, bias, act, backend):  # type: ignore[no-untyped-def]
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
    backend: str,
) -> torch.Tensor:
    """See ``quads_common.moe.fused_moe``; backend as in ``quads_linear``."""
    return _layers(backend)[1](
        x,
        QuantizedTensor(w13_packed, w13_block_scale, w13_global_scale),
        QuantizedTensor(w2_packed, w2_block_scale, w2_global_scale),
        topk_weights,
        topk_ids,
        activation=_activation(activation, limit),
        act=act,
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )


@quads_moe.register_fake
def _(x, *args):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


@cache
def _layers(backend: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The linear and the MoE layer of a backend."""
    if backend == "emulated":
        from quads_common.gemm import linear
        from quads_common.moe import fused_moe

        return linear, fused_moe
    if backend == "triton":
        from quads_common.kernels.gemm import linear_triton
        from quads_common.kernels.moe import fused_moe_triton

        return linear_triton, fused_moe_triton
    if backend == "hopper":
        from quads_common.kernels.gemm import linear_triton
        from quads_common.kernels.moe import fused_moe_hopper

        return linear_triton, fused_moe_hopper
    if backend == "blackwell":
        from quads_common.kernels.blackwell.linear import linear_blackwell
        from quads_common.kernels.blackwell.moe import fused_moe_blackwell

        return linear_blackwell, fused_moe_blackwell
    raise ValueError(f"backend {backend!r} has no layers: choose_backend returns one that has")


_activation = cache(Activation)
