"""Layers that stay BF16 on a CPU: loadable forever, like everything else.

vLLM's CPU backend repacks the weights of unquantized layers after the first load and drops or
bypasses the parameter, so that a later ``model.load_weights`` fails on it or changes nothing. With
these methods the layer multiplies by its parameter. On other devices vLLM's own methods are used.
"""

import torch
from torch import nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform

__all__ = ["kept_embedding_method", "kept_linear_method"]


class _CpuLinearMethod(UnquantizedLinearMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear


class _CpuEmbeddingMethod(UnquantizedEmbeddingMethod):
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.cpu_linear = torch.nn.functional.linear


def kept_linear_method() -> UnquantizedLinearMethod:
    """Method of a linear layer that placement keeps."""
    return _CpuLinearMethod() if current_platform.is_cpu() else UnquantizedLinearMethod()


def kept_embedding_method() -> UnquantizedEmbeddingMethod | None:
    """Method of an embedding or lm_head; None lets vLLM choose its own."""
    return _CpuEmbeddingMethod() if current_platform.is_cpu() else None
