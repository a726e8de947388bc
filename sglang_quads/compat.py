"""What differs between SGLang's versions, 0.5.12 to 0.5.23; the only file that asks.

============================  =======================  ========================================
what                          0.5.12 to 0.5.15         later
============================  =======================  ========================================
update functions              ``ModelRunner``          ``WeightUpdater`` of a model runner
end of an update              none                     0.5.23: ``end_weight_update``
server arguments resolved in  ``__post_init__``        0.5.20: ``resolve_once``
explicit cache flush          0.5.12: ``Scheduler``    ``SchedulerFlushWrapper``
memory release and resume     0.5.12: a mixin          ``SchedulerWeightUpdaterManager``
``check_weights`` payload     0.5.12: rank 0's only    one per tensor-parallel rank
============================  =======================  ========================================

0.5.15.post1 is what the suite runs; 0.5.23 was run by hand (docs/sglang.md); of the others the
source was read.
"""

import logging
import pkgutil
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import torch
from torch import nn

__all__ = [
    "NEWEST",
    "OLDEST",
    "add_quantization_method",
    "answers_for_all_ranks",
    "checked_model",
    "device_type",
    "end_update_target",
    "flush_target",
    "memory_targets",
    "missing",
    "parallelism_info",
    "resolve_target",
    "tensor_request_target",
    "update_targets",
    "updated_model",
    "updated_model_config",
    "version",
    "warming_up",
    "warn_of_untested_version",
]

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 5, 12), (0, 5, 23)
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_REGISTRY = "sglang.srt.plugins.hook_registry"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def version() -> tuple[int, ...]:
    """Of the installed SGLang; () for a version that is no number."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", metadata.version("sglang"))
    return tuple(int(n) for n in found.groups()) if found else ()


def warn_of_untested_version() -> None:
    """A WARNING outside the range that this file was written for."""
    if not OLDEST <= version() <= NEWEST:
        logger.warning(
            "quads_nvfp4 was written for SGLang %s to %s, this is %s",
            ".".join(map(str, OLDEST)),
            ".".join(map(str, NEWEST)),
            metadata.version("sglang"),
        )


def add_quantization_method(name: str, config: type) -> None:
    """Enter the method into SGLang's tables, which other modules have imported already."""
    from sglang.srt import server_args
    from sglang.srt.layers import quantization

    for table in ("BASE_QUANTIZATION_METHODS", "QUANTIZATION_METHODS", "CPU_QUANTIZATION_METHODS"):
        known = getattr(quantization, table, None)
        if known is not None:
            known[name] = config
    if name not in server_args.QUANTIZATION_CHOICES:
        server_args.add_quantization_method_choices([name])


def resolve_target() -> str:
    """The method of ``ServerArgs`` that turns what the user gave into what counts."""
    newer = exists("sglang.srt.server_args.ServerArgs.resolve_once")
    return f"sglang.srt.server_args.ServerArgs.{'resolve_once' if newer else '__post_init__'}"


def update_targets() -> dict[str, str]:
    """Functions that load new weights, each with the kind it is."""
    owner = _UPDATER if exists(_UPDATER) else _RUNNER
    distributed = "load_weights_from_distributed"
    if not exists(f"{owner}.{distributed}"):
        distributed = "update_weights_from_distributed"
    return {
        f"{owner}.update_weights_from_disk": "disk",
        f"{owner}.update_weights_from_tensor": "tensor",
        f"{owner}.{distributed}": "distributed",
        f"{owner}.update_weights_from_ipc": "ipc",
    }


def tensor_request_target() -> str:
    """What reads the tensors of a request before it hands them to an update function."""
    return "sglang.srt.managers.tp_worker.BaseTpWorker.update_weights_from_tensor"


def end_update_target() -> str | None:
    """What ends a weight update session; None where there are none."""
    target = f"{_MANAGER}.end_weight_update"
    return target if exists(target) else None


def flush_target() -> str:
    """What handles a request to flush the cache (not the flush after an update)."""
    wrapper = "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper.handle"
    return wrapper if exists(wrapper) else f"{_SCHEDULER}.flush_cache_wrapped"


def memory_targets() -> tuple[str, str]:
    """Release and resume of memory."""
    owner = _MANAGER
    if not exists(owner):
        owner = "sglang.srt.managers.scheduler_update_weights_mixin.SchedulerUpdateWeightsMixin"
    return f"{owner}.release_memory_occupation", f"{owner}.resume_memory_occupation"


def static_state_target() -> str | None:
    """What copies a model's buffers before their memory is released; None where it is elsewhere."""
    target = memory_targets()[0].rsplit(".", 2)[0] + "._export_static_state"
    return target if exists(target) else None


def answers_for_all_ranks() -> bool:
    """Whether ``check_weights`` collects what each tensor-parallel rank returns."""
    return exists(_MANAGER)


def updated_model(owner: Any) -> nn.Module:
    """The model of a ``ModelRunner`` or ``WeightUpdater``."""
    return owner.get_model() if hasattr(owner, "get_model") else owner.model


def updated_model_config(owner: Any) -> Any:
    """Its ``ModelConfig``."""
    return owner.model_config


def checked_model(checker: Any) -> nn.Module:
    """The model of a ``WeightChecker``."""
    return checker._get_model() if hasattr(checker, "_get_model") else checker._model_runner.model


def parallelism_info(checker: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a ``WeightChecker`` says of this rank; kwargs: of its ``handle``."""
    role = {"role": kwargs["role"]} if "role" in kwargs else {}
    return checker._parallelism_info(**role).model_dump()


def warming_up() -> bool:
    """Whether this process is an HTTP server that is not up yet, but will warm itself up."""
    module = sys.modules.get("sglang.srt.entrypoints.http_server")
    manager = getattr(getattr(module, "_global_state", None), "tokenizer_manager", None)
    if manager is None or manager.server_args.skip_server_warmup:
        return False
    return manager.server_status.name == "Starting"


def device_type() -> str:
    """ "cuda", "cpu" or another platform's name."""
    from sglang.srt import utils

    if utils.is_cpu():
        return "cpu"
    return "cuda" if utils.is_cuda() else str(torch.device(utils.get_device()).type)


def exists(target: str) -> bool:
    """Whether a dotted name can be resolved."""
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def missing(targets: Iterable[str]) -> list[str]:
    """Those of our hooks that SGLang did not apply; it logs such errors and goes on."""
    found = [(t, pkgutil.resolve_name(t) if exists(t) else None) for t in targets]
    return [target for target, function in found if not _hooked(function)]


def _hooked(function: Any) -> bool:
    """Whether one of a function's layers is a wrapper of the registry; others decorate too."""
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__") == _REGISTRY:
            return True
        function = getattr(function, "__wrapped__", None)
    return False
