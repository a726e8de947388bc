"""Quantize once, use in many forwards: for gradient accumulation, log-prob passes, generation."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quads_common.qat.weight import prepared_weights

__all__ = ["cached_quantization"]


@contextmanager
def cached_quantization(model: nn.Module) -> Iterator[None]:
    """Keep effective weights between the forwards inside the ``with`` block.

    Costs one more copy of the prepared weights. A kept value is used only while the parameter (and
    every one that shares its scale) is the same object at the same address with the same version
    counter, and no ``torch.optim`` optimizer has stepped: in-place updates and ``load_state_dict``
    lead to a new one. Writes that torch cannot see (``parameter.data.copy_()``, raw pointers)
    belong outside the block. A compiled forward ignores the block.

    Raises:
        ValueError: the model is not prepared, or is sharded by ``fully_shard`` (the cache would
            hold every full weight, and gathering leaves no trace in version counters).
    """
    weights = prepared_weights(model)
    if not weights:
        raise ValueError("the model is not prepared: call prepare_qat first")
    if _is_fully_sharded(model):
        raise ValueError(
            "cached_quantization does not work with fully_shard: the cache would hold every full "
            "weight on every rank"
        )

    def forget(*_: Any) -> None:
        for weight in weights:
            weight.kept = None

    before = [weight.caching for weight in weights]
    step_hook = register_optimizer_step_post_hook(forget)
    try:
        for weight in weights:
            weight.caching = True
        yield
    finally:
        step_hook.remove()
        forget()
        for weight, caching in zip(weights, before, strict=True):
            weight.caching = caching


def _is_fully_sharded(model: nn.Module) -> bool:
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())
