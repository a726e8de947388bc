"""SGLang features that the method does not support, refused by name before a layer is made."""

from typing import Any

from quads_common.options import QUANT_METHOD
from sglang_quads.loading import LOAD_FORMATS

__all__ = ["check_load_format", "check_model", "check_server_args"]


def check_server_args(args: Any) -> None:
    """Raise ``ValueError`` naming the feature and what to do about it.

    args: ``ServerArgs``; fields that a version does not have count as unset.
    """

    def given(field: str) -> Any:
        return getattr(args, field, None)

    refused = {
        "LoRA (--enable-lora, --lora-paths): serve merged weights": (
            given("enable_lora") or given("lora_paths")
        ),
        "expert load balancing (--enable-eplb, --ep-num-redundant-experts, "
        "--init-expert-location): leave it off": (
            given("enable_eplb")
            or given("ep_num_redundant_experts")
            or given("init_expert_location") not in (None, "trivial")
            or given("elastic_ep_backend")
        ),
        f"--moe-a2a-backend {given('moe_a2a_backend')} (DeepEP and its like): use none": (
            given("moe_a2a_backend") not in (None, "none")
        ),
        f"--moe-runner-backend {given('moe_runner_backend')}: use auto or triton": (
            given("moe_runner_backend") not in (None, "auto", "triton")
        ),
        "pipeline parallelism (--pp-size > 1): use tensor or expert parallelism": (
            (given("pp_size") or 1) > 1
        ),
        "speculative decoding (--speculative-algorithm): leave it off": (
            given("speculative_algorithm")
        ),
        "CPU offloading of weights (--cpu-offload-gb, --offload-group-size): leave it off": (
            given("cpu_offload_gb") or (given("offload_group_size") or 0) > 0
        ),
        "KTransformers (--kt-weight-path): leave it off": given("kt_weight_path"),
        "batch overlap (--enable-two-batch-overlap, --enable-single-batch-overlap): leave it off": (
            given("enable_two_batch_overlap") or given("enable_single_batch_overlap")
        ),
        "torchao (--torchao-config): leave it off": given("torchao_config"),
        "FlashRL's profile (--rl-quant-profile): leave it off": given("rl_quant_profile"),
        "the shared weight cache (--weight-cache-mode): use off": (
            given("weight_cache_mode") not in (None, "off")
        ),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(f"{QUANT_METHOD} does not support {what}")
    check_load_format(given("load_format"))


def check_load_format(load_format: Any) -> None:
    """Refuse loaders that hand out no checkpoint tensors or skip processing (flash_rl).

    Raises:
        ValueError: naming it and those that are allowed. None and "auto" are.
    """
    name = str(getattr(load_format, "value", load_format or "auto"))
    if name not in LOAD_FORMATS:
        raise ValueError(
            f"{QUANT_METHOD} does not support load format {name!r}: use one of {list(LOAD_FORMATS)}"
        )


def check_model(args: Any, dtype: str, backend: str, act: str) -> None:
    """What depends on the model's dtype ("float32") and on the backend and activations chosen.

    Raises:
        ValueError: naming the feature and what to do about it.
    """
    on_gpu = getattr(args, "device", None) in (None, "cuda")
    refused = {
        "CUDA graphs (backend emulated): add --disable-cuda-graph": (
            backend == "emulated" and on_gpu and not getattr(args, "disable_cuda_graph", False)
        ),
        f"--dtype float32 with act bf16 (backend {backend}): use bfloat16 or backend emulated": (
            backend != "emulated" and act == "bf16" and dtype == "float32"
        ),
    }
    for what, present in refused.items():
        if present:
            raise ValueError(f"{QUANT_METHOD} does not support {what}")
