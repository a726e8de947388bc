"""vLLM features that the method does not support, refused by name before a layer is made."""

import torch
from vllm.config import VllmConfig

from quads_common.options import QUANT_METHOD
from vllm_quads.loading import LOAD_FORMATS

__all__ = ["check_supported"]


def check_supported(vllm_config: VllmConfig, backend: str, act: str) -> None:
    """Raise ``ValueError`` naming the feature and what to do about it.

    backend: the one chosen, act: the option.
    """
    parallel = vllm_config.parallel_config
    offload = getattr(vllm_config, "offload_config", None)
    on_cuda = vllm_config.device_config.device_type == "cuda"
    refused = {
        "LoRA (--enable-lora): serve merged weights": vllm_config.lora_config is not None,
        "expert load balancing (--enable-eplb): leave it off": parallel.enable_eplb,
        "pipeline parallelism (--pipeline-parallel-size > 1): use tensor or expert parallelism": (
            parallel.pipeline_parallel_size > 1
        ),
        "speculative decoding (--speculative-config): leave it off": (
            vllm_config.speculative_config is not None
        ),
        "CPU offloading of weights (--cpu-offload-gb): set it to 0": _offloads(offload),
        "the Transformers backend (--model-impl transformers, or an architecture that vLLM has "
        "no model of), where q, k and v do not share one scale: use a model of vLLM's": (
            vllm_config.model_config.using_transformers_backend()
        ),
        f"all-to-all backend {parallel.all2all_backend!r} with data parallel experts: use "
        "allgather_reducescatter": (
            parallel.data_parallel_size > 1
            and parallel.enable_expert_parallel
            and parallel.all2all_backend != "allgather_reducescatter"
        ),
        f"load format {vllm_config.load_config.load_format!r}: use one of {list(LOAD_FORMATS)}": (
            str(vllm_config.load_config.load_format) not in LOAD_FORMATS
        ),
        "weight transfer backend 'sparse_nccl', which patches kernel-format tensors: use nccl": (
            getattr(vllm_config.weight_transfer_config, "backend", None) == "sparse_nccl"
        ),
        "CUDA graphs (backend emulated): add --enforce-eager": (
            backend == "emulated" and on_cuda and not vllm_config.model_config.enforce_eager
        ),
        f"--dtype float32 with act bf16 (backend {backend}): use bfloat16 or backend emulated": (
            backend != "emulated"
            and act == "bf16"
            and vllm_config.model_config.dtype == torch.float32
        ),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(f"{QUANT_METHOD} does not support {what}")


def _offloads(offload: object) -> bool:
    uva = getattr(offload, "uva", None)
    prefetch = getattr(offload, "prefetch", None)
    return bool(getattr(uva, "cpu_offload_gb", 0)) or bool(
        getattr(prefetch, "offload_group_size", 0)
    )
