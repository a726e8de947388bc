"""The compensated layers as opaque ``torch.library`` operators for every graph compiler.

As ``quads_common.ops``, with selections as data, so that a refresh changes no graph, and with the
buffers of sampled rows declared as mutated. Import this module once per process before tracing.

Backends: ``emulated`` computes the exact form in torch; ``triton`` and ``hopper`` the folded one on
tensor cores (``fold``), ``triton_exact`` and ``hopper_exact`` the exact one there.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

from quads_common.activation import Activation
from quads_common.compensation.linear import linear_compensated
from quads_common.compensation.moe import Gathering, fused_moe_compensated
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor

__all__ = [
    "form_backend",
    "quads_linear_compensated",
    "quads_moe_compensated",
]

# Backends (``quads_common.backend``) that the operators here run on.
_BACKENDS = ("emulated", "triton", "triton_exact", "hopper", "hopper_exact", "blackwell")


def form_backend(backend: str, exact: bool) -> str:
    """The name to call the operators with; the backends that never fold are exact anyway."""
    name = f"{backend}_exact"
    return name if exact and name in _BACKENDS else backend


@torch.library.custom_op("quads::linear_compensated", mutates_args=("staged",))
def quads_linear_compensated(
    x: torch.Tensor,
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None,
    block_mask: torch.Tensor | None,
    channels: torch.Tensor | None,
    hot_bits: torch.Tensor | None,
    columns: torch.Tensor | None,
    alpha: float,
    sample_map: torch.Tensor | None,
    staged: list[torch.Tensor],
    backend: str,
) -> torch.Tensor:
    """See ``linear_compensated``.

    global_scale: one element, any shape. sample_map, staged: map, rows and groups of ``Staging``;
    nothing is kept without a map. ``staged`` has two tensors all the same: compilers cannot do with
    an empty list of mutated ones.
    """
    return _layers(backend)[0](
        x,
        QuantizedTensor(packed, block_scale, global_scale.reshape(())),
        bias,
        compensation=InputCompensation(block_mask, channels, columns, alpha, hot_bits),
        staging=_staging(sample_map, staged),
    )


@quads_linear_compensated.register_fake
def _(x, packed, *args):  # type: ignore[no-untyped-def]
    return x.new_empty((*x.shape[:-1], packed.shape[0]))


@torch.library.custom_op("quads::moe_compensated", mutates_args=("staged",))
def quads_moe_compensated(
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
    apply_router_weight_on_input: bool,
    w13_block_mask: torch.Tensor | None,
    w13_channels: torch.Tensor | None,
    w13_hot_bits: torch.Tensor | None,
    w13_columns: torch.Tensor | None,
    w2_block_mask: torch.Tensor | None,
    w2_channels: torch.Tensor | None,
    w2_hot_bits: torch.Tensor | None,
    w2_columns: torch.Tensor | None,
    alpha: float,
    sample_map: torch.Tensor | None,
    staged: list[torch.Tensor],
    backend: str,
) -> torch.Tensor:
    """See ``fused_moe_compensated``; staged: rows and groups of w13's input, then of w2's."""
    return _layers(backend)[1](
        x,
        QuantizedTensor(w13_packed, w13_block_scale, w13_global_scale),
        QuantizedTensor(w2_packed, w2_block_scale, w2_global_scale),
        topk_weights,
        topk_ids,
        w13_input=InputCompensation(w13_block_mask, w13_channels, w13_columns, alpha, w13_hot_bits),
        w2_input=InputCompensation(w2_block_mask, w2_channels, w2_columns, alpha, w2_hot_bits),
        gathering=Gathering(_staging(sample_map, staged[:2]), _staging(sample_map, staged[2:])),
        activation=Activation(activation, limit),
        expert_map=expert_map,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )


@quads_moe_compensated.register_fake
def _(x, *args):  # type: ignore[no-untyped-def]
    return torch.empty_like(x)


def _staging(sample_map: torch.Tensor | None, staged: list[torch.Tensor]) -> Staging | None:
    return None if sample_map is None else Staging(sample_map, *staged)


@cache
def _layers(backend: str) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    """The compensated linear and MoE layer of a backend."""
    if backend == "emulated":
        return linear_compensated, fused_moe_compensated
    if backend == "blackwell":
        from quads_common.kernels.blackwell.linear import linear_blackwell
        from quads_common.kernels.blackwell.moe import fused_moe_blackwell

        return linear_blackwell, fused_moe_blackwell
    if backend in _BACKENDS:
        from quads_common.kernels import compensated

        experts = {
            "triton": compensated.fused_moe_compensated_triton,
            "hopper": compensated.fused_moe_compensated_hopper,
        }
        name, _, form = backend.partition("_")
        exact = form == "exact"
        return (
            partial(compensated.linear_compensated_triton, exact=exact),
            partial(experts[name], exact=exact),
        )
    raise ValueError(f"backend {backend!r} cannot compensate: {list(_BACKENDS)} can")
