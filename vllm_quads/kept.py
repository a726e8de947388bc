"""Layers that stay BF16: loadable forever and never half garbage, like everything else.

- vLLM's layerwise reload replaces a layer that got only some of its shards (q but not k, v) by one
  with uninitialized memory in it. With these methods it passes the layer over (see ``loading``),
  and each tensor is copied where it belongs when it comes.
- vLLM's CPU backend repacks the weights of unquantized layers after the first load and drops or
  bypasses the parameter, so that a later ``model.load_weights`` fails on it or changes nothing.
  There the layer multiplies by its parameter instead.

Routed experts that stay BF16 are left to vLLM: on a GPU send all of a layer's in one weight update;
on a CPU, where vLLM computes with a repacked copy of the old ones, new weights are refused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

from vllm_quads.loading import load_themselves

__all__ = ["KeptEmbeddingMethod", "KeptLinearMethod", "refuse_reloads_on_cpu"]


class _Kept:
    """What both methods add to vLLM's own."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        """As vLLM does."""
        super().create_weights(layer, *args, **kwargs)
        load_themselves(layer, [])

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing but the choice of the CPU's multiplication."""
        if current_platform.is_cpu():
            layer.cpu_linear = torch.nn.functional.linear


class KeptLinearMethod(_Kept, UnquantizedLinearMethod):
    """Method of a linear layer that placement keeps."""


class KeptEmbeddingMethod(_Kept, UnquantizedEmbeddingMethod):
    """Method of an embedding or lm_head."""


def refuse_reloads_on_cpu(layer: nn.Module, prefix: str) -> None:
    """Make experts that stay BF16 on a CPU raise when they are sent weights a second time."""
    if not current_platform.is_cpu():
        return
    load_weights = layer.load_weights

    def load_once(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[str]:
        if getattr(layer, "_quads_served", False):
            raise NotImplementedError(
                f"{prefix} stays BF16, and vLLM's CPU backend cannot take new weights for such "
                "experts: quantize them, or start a new engine"
            )
        return load_weights(weights)

    layer.load_weights = load_once
