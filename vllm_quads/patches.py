"""Every change to vLLM's own classes, one function each.

1. ``EngineArgs.create_model_config``: options from the environment variable ``VLLM_QUADS_CONFIG``
   for trainers that pass no engine options through, and option errors before a process is started.
   vLLM offers plugins no hook between argument parsing and the model configuration.
2. ``WorkerBase``: methods added (none replaced) so that ``collective_rpc("quads_...")`` finds them
   without occupying ``worker_extension_cls``, which trainers use themselves.
"""

import fnmatch
import functools
import os
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.v1.worker.worker_base import WorkerBase

from quads_common.options import QUANT_METHOD, QuadsOptions, read_environment_options
from vllm_quads.config import ADDITIONAL_CONFIG_KEY, additional_options

__all__ = ["ENVIRONMENT_VARIABLE", "apply"]

logger = init_logger(__name__)

ENVIRONMENT_VARIABLE = "VLLM_QUADS_CONFIG"
_PATCHED = "_quads_patched"


def apply() -> None:
    """Install both; does nothing the second time."""
    _patch_create_model_config()
    _add_worker_methods()


def _patch_create_model_config() -> None:
    original = EngineArgs.create_model_config
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def create_model_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        prepare_engine_args(self, os.environ.get(ENVIRONMENT_VARIABLE))
        return original(self, *args, **kwargs)

    setattr(create_model_config, _PATCHED, True)
    EngineArgs.create_model_config = create_model_config


def prepare_engine_args(args: EngineArgs, environment: str | None) -> None:
    """Switch the method on if the environment says so, and fold its options into ``args``.

    They go into ``additional_config``, which vLLM hashes into its compile cache key.

    Raises:
        ValueError: an option error, naming the variable or the key.
    """
    options = read_environment_options(ENVIRONMENT_VARIABLE, environment)
    enable = options.pop("enable", False)
    pattern = options.pop("model", "*")
    if not isinstance(enable, bool) or not isinstance(pattern, str):
        raise ValueError(
            f'{ENVIRONMENT_VARIABLE}: "enable" must be true or false and "model" a path pattern, '
            f"got {enable!r} and {pattern!r}"
        )
    matches = fnmatch.fnmatch(str(args.model), pattern)
    if args.quantization is None and enable and matches:
        args.quantization = QUANT_METHOD
        logger.info("%s switches on quads_nvfp4 for %s", ENVIRONMENT_VARIABLE, args.model)
    if args.quantization != QUANT_METHOD:
        return
    _complete_hf_overrides(args)
    explicit = additional_options(args.additional_config)
    from_environment = options if matches else {}
    QuadsOptions.from_dict(from_environment, ENVIRONMENT_VARIABLE)
    QuadsOptions.from_dict(explicit, f"additional_config[{ADDITIONAL_CONFIG_KEY!r}]")
    merged = {**from_environment, **explicit}
    if merged:
        args.additional_config = {**(args.additional_config or {}), ADDITIONAL_CONFIG_KEY: merged}


def _complete_hf_overrides(args: EngineArgs) -> None:
    """vLLM wants ``quant_method`` in an overriding quantization_config; the flag has said it."""
    overrides = args.hf_overrides
    section = overrides.get("quantization_config") if isinstance(overrides, dict) else None
    if isinstance(section, dict) and "quant_method" not in section:
        completed = {**section, "quant_method": QUANT_METHOD}
        args.hf_overrides = {**overrides, "quantization_config": completed}


def _add_worker_methods() -> None:
    from vllm_quads.report import quads_report

    for method in (quads_report,):
        if not hasattr(WorkerBase, method.__name__):
            setattr(WorkerBase, method.__name__, method)
