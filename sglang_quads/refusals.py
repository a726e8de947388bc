"""SGLang features that the method does not support, refused by name before a layer is made.

``REFUSED_ARGS`` and ``REFUSED_MODELS`` are all of them, but for load formats and what single layers
refuse; tests/sglang/test_refusals.py has a case for each row.
"""

from collections.abc import Callable
from typing import Any

from quads_common.options import QUANT_METHOD
from sglang_quads.loading import LOAD_FORMATS

__all__ = [
    "REFUSED_ARGS",
    "REFUSED_MODELS",
    "check_load_format",
    "check_model",
    "check_model_class",
    "check_server_args",
]


def _other_than(*allowed: str) -> Callable[[Any], bool]:
    return lambda value: value not in (None, *allowed)


def _float16(value: Any) -> bool:
    return str(value).lower().removeprefix("torch.") in ("half", "float16")


def _above(most: int) -> Callable[[Any], bool]:
    return lambda value: (value or 0) > most


_LORA = "LoRA (--enable-lora, --lora-paths): serve merged weights"
_BALANCING = (
    "expert load balancing (--enable-eplb, --ep-num-redundant-experts, --init-expert-location): "
    "leave it off"
)
_OFFLOADING = "CPU offloading of weights (--cpu-offload-gb, --offload-group-size): leave it off"
_OVERLAP = "batch overlap (--enable-two-batch-overlap, --enable-single-batch-overlap): leave it off"

# Field of ``ServerArgs``: what to say of its value, and which values are refused. 0.5.15.post1 has
# no --weight-cache-mode.
REFUSED_ARGS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "enable_lora": (_LORA, bool),
    "lora_paths": (_LORA, bool),
    "enable_eplb": (_BALANCING, bool),
    "ep_num_redundant_experts": (_BALANCING, bool),
    "init_expert_location": (_BALANCING, _other_than("trivial")),
    "elastic_ep_backend": ("elastic EP (--elastic-ep-backend {}): leave it off", bool),
    "moe_a2a_backend": (
        "--moe-a2a-backend {} (DeepEP and its like): use none",
        _other_than("none"),
    ),
    "moe_runner_backend": (
        "--moe-runner-backend {}: use auto or triton",
        _other_than("auto", "triton"),
    ),
    "model_impl": (
        "--model-impl {}, where q, k and v do not share one scale: use auto or sglang",
        _other_than("auto", "sglang"),
    ),
    "dtype": ("--dtype {} (outputs of GEMMs may pass 65504): use bfloat16", _float16),
    "pp_size": (
        "pipeline parallelism (--pp-size {}): use tensor or expert parallelism",
        _above(1),
    ),
    "speculative_algorithm": (
        "speculative decoding (--speculative-algorithm {}): leave it off",
        bool,
    ),
    "cpu_offload_gb": (_OFFLOADING, bool),
    "offload_group_size": (_OFFLOADING, _above(0)),
    "kt_weight_path": ("KTransformers (--kt-weight-path): leave it off", bool),
    "enable_two_batch_overlap": (_OVERLAP, bool),
    "enable_single_batch_overlap": (_OVERLAP, bool),
    "torchao_config": ("torchao (--torchao-config {}): leave it off", bool),
    "rl_quant_profile": ("FlashRL's profile (--rl-quant-profile): leave it off", bool),
    "weight_cache_mode": (
        "the shared weight cache (--weight-cache-mode {}): use off",
        _other_than("off"),
    ),
}


def check_server_args(args: Any) -> None:
    """Raise ``ValueError`` naming the feature and what to do about it.

    args: ``ServerArgs``; fields that a version does not have count as unset.
    """
    for field, (what, refused) in REFUSED_ARGS.items():
        if refused(value := getattr(args, field, None)):
            _refuse(what.format(getattr(value, "value", value)))
    check_load_format(getattr(args, "load_format", None))


def check_load_format(load_format: Any) -> None:
    """Refuse loaders that hand out no checkpoint tensors or skip processing (flash_rl).

    Raises:
        ValueError: naming it and those that are allowed. None and "auto" are.
    """
    name = str(getattr(load_format, "value", load_format or "auto"))
    if name not in LOAD_FORMATS:
        _refuse(f"load format {name!r}: use one of {list(LOAD_FORMATS)}")


def check_model_class(model_class: type) -> None:
    """Refuse Transformers' models, which SGLang also takes for architectures that it has not.

    They hold q, k and v in layers of their own, so each would have a scale of its own, where a
    trainer gives them one.

    Raises:
        ValueError: naming the class.
    """
    if (name := model_class.__name__).startswith("Transformers"):
        _refuse(
            f"{name}: this SGLang has no model of its own for the architecture, and in "
            "Transformers' q, k and v do not share one scale"
        )


def _graphs(args: Any, dtype: str, backend: str, act: str) -> bool:
    on_gpu = getattr(args, "device", None) in (None, "cuda")
    return backend == "emulated" and on_gpu and not getattr(args, "disable_cuda_graph", False)


def _wide_activations(args: Any, dtype: str, backend: str, act: str) -> bool:
    return backend != "emulated" and act == "bf16" and dtype == "float32"


REFUSED_MODELS: dict[str, Callable[[Any, str, str, str], bool]] = {
    "CUDA graphs (backend emulated): add --disable-cuda-graph": _graphs,
    "--dtype float32 with act bf16 (backend {}): use bfloat16 or backend emulated": (
        _wide_activations
    ),
}


def check_model(args: Any, dtype: str, backend: str, act: str) -> None:
    """What depends on the model's dtype ("float32") and on the backend and activations chosen.

    Raises:
        ValueError: naming the feature and what to do about it.
    """
    for what, refused in REFUSED_MODELS.items():
        if refused(args, dtype, backend, act):
            _refuse(what.format(backend))


def _refuse(what: str) -> None:
    raise ValueError(f"{QUANT_METHOD} does not support {what}")
