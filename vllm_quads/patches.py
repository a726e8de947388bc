"""Every change to vLLM's own classes, one function each.

1. ``EngineArgs.create_model_config`` and ``.create_engine_config``: options from the environment
   variable ``VLLM_QUADS_CONFIG`` for trainers that pass no engine options through, and errors of
   options and refused features before a process is started. vLLM offers plugins no hook there.
2. ``WorkerBase``: methods added (none replaced) so that ``collective_rpc("quads_...")`` finds them
   without occupying ``worker_extension_cls``, which trainers use themselves.
3. ``EngineCore.reset_prefix_cache``: trainers that call nothing after loading call this; it is the
   boundary at which incomplete units are reported and dropped. Only the scheduler hears of it.
   ``EngineCore.collective_rpc`` and ``.wake_up``: weight syncs and our worker methods run through
   them, and where they changed a selection, be it before an error, the prefix cache holds results
   of another model. ``.step`` and ``.step_with_batch_queue``: a reset that had to wait for requests
   is made up for before anything is looked up in that cache again.
4. ``WorkerWrapperBase.execute_model``, ``.sleep``, ``.wake_up``: after sleep level 2 the weights
   are gone, and a model must not run on what lies in their place; and the scheduler's count of
   tokens says which rows statistics may count; those that wait are counted before sleep. Every
   executor but Ray's compiled graphs runs models through this class.
5. ``WorkerWrapperBase.load_model``: says what was quantized, and refuses to serve if nothing was.
6. ``WorkerWrapperBase.reload_weights``: refuses kernel-format tensors, which vLLM would cast into
   packed codes.
"""

import contextlib
import fnmatch
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.worker_base import WorkerBase, WorkerWrapperBase

from quads_common.layer_weights import mark_lost, raise_if_lost
from quads_common.options import QUANT_METHOD, merge_options, read_environment_options
from vllm_quads.config import (
    ADDITIONAL_CONFIG_KEY,
    ADDITIONAL_SOURCE,
    QuadsNvfp4Config,
    additional_options,
)
from vllm_quads.metrics import publish
from vllm_quads.prefix_cache import reset_after_change, reset_if_changed, retry_reset
from vllm_quads.report import after_loading, quads_report
from vllm_quads.selection import WORKER_METHODS
from vllm_quads.sync import (
    quads_end_sync,
    quads_fingerprints,
    runtime_of,
)

__all__ = ["ENVIRONMENT_VARIABLE", "apply"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own

ENVIRONMENT_VARIABLE = "VLLM_QUADS_CONFIG"
_PATCHED = "_quads_patched"
_WEIGHTS_LOST = "_quads_weights_lost"


def apply() -> None:
    """Install them; does nothing the second time."""
    _patch_engine_args()
    _add_worker_methods()
    _patch_engine_core()
    _patch_worker_wrapper()


def _patch_engine_args() -> None:
    create_model, create_engine = EngineArgs.create_model_config, EngineArgs.create_engine_config
    if hasattr(create_model, _PATCHED):
        return

    @functools.wraps(create_model)
    def create_model_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        environment = read_environment_options(
            ENVIRONMENT_VARIABLE, os.environ.get(ENVIRONMENT_VARIABLE)
        )
        options = enable_from_environment(self, environment)
        model_config = create_model(self, *args, **kwargs)
        if model_config.quantization == QUANT_METHOD:
            fold_options(self, model_config.hf_config, options)
        return model_config

    @functools.wraps(create_engine)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        vllm_config = create_engine(self, *args, **kwargs)
        if isinstance(vllm_config.quant_config, QuadsNvfp4Config):
            vllm_config.quant_config.prepare(vllm_config)
            publish(vllm_config.quant_config.engine_id)
        return vllm_config

    setattr(create_model_config, _PATCHED, True)
    EngineArgs.create_model_config = create_model_config
    EngineArgs.create_engine_config = create_engine_config


def enable_from_environment(args: EngineArgs, environment: dict[str, Any]) -> dict[str, Any]:
    """Switch the method on if the environment says so; return the environment's other options.

    Raises:
        ValueError: "enable" or "model" of the wrong type.
    """
    options = dict(environment)
    enable, pattern = options.pop("enable", False), options.pop("model", "*")
    if not isinstance(enable, bool) or not isinstance(pattern, str):
        raise ValueError(
            f'{ENVIRONMENT_VARIABLE}: "enable" must be true or false and "model" a path pattern, '
            f"got {enable!r} and {pattern!r}"
        )
    if args.quantization is None and enable and fnmatch.fnmatch(str(args.model), pattern):
        args.quantization = QUANT_METHOD
        logger.info("%s switches on quads_nvfp4 for %s", ENVIRONMENT_VARIABLE, args.model)
    if args.quantization == QUANT_METHOD:
        _complete_hf_overrides(args)
    return options


def fold_options(args: EngineArgs, hf_config: Any, environment: dict[str, Any]) -> None:
    """Check the options of all places and put the environment's into ``args.additional_config``.

    vLLM hashes that into its compile cache key.

    Raises:
        ValueError: an option error, naming the place and the key.
    """
    explicit = additional_options(args.additional_config)
    in_model = getattr(hf_config, "quantization_config", None)
    merge_options(
        {
            "quantization_config": in_model if isinstance(in_model, dict) else {},
            ADDITIONAL_SOURCE: explicit,
            ENVIRONMENT_VARIABLE: environment,
        }
    )
    folded = {**environment, **explicit}
    if folded:
        args.additional_config = {**(args.additional_config or {}), ADDITIONAL_CONFIG_KEY: folded}


def _complete_hf_overrides(args: EngineArgs) -> None:
    """vLLM wants ``quant_method`` in an overriding quantization_config; the flag has said it."""
    overrides = args.hf_overrides
    section = overrides.get("quantization_config") if isinstance(overrides, dict) else None
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"hf_overrides: quantization_config must be an object, got {section!r}")
    if section is not None and section.get("quant_method") is None:
        completed = {**section, "quant_method": QUANT_METHOD}
        args.hf_overrides = {**overrides, "quantization_config": completed}


def _add_worker_methods() -> None:
    for method in (quads_report, quads_fingerprints, quads_end_sync, *WORKER_METHODS):
        if not hasattr(WorkerBase, method.__name__):
            setattr(WorkerBase, method.__name__, method)


def _patch_engine_core() -> None:
    reset, rpc, wake = EngineCore.reset_prefix_cache, EngineCore.collective_rpc, EngineCore.wake_up
    if hasattr(reset, _PATCHED):
        return

    def ours(core: EngineCore) -> bool:
        return core.vllm_config.model_config.quantization == QUANT_METHOD

    @functools.wraps(reset)
    def reset_prefix_cache(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        if not ours(self):
            return reset(self, *args, **kwargs)
        with resetting(self):
            self.model_executor.collective_rpc("quads_end_sync")
        return reset_after_change(self, lambda core: reset(core, *args, **kwargs))

    @functools.wraps(rpc)
    def collective_rpc(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        with resetting(self):
            result = rpc(self, *args, **kwargs)
        if ours(self):
            reset_if_changed(self, reset)
        return result

    @functools.wraps(wake)
    def wake_up(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
        with resetting(self):
            result = wake(self, *args, **kwargs)
        if ours(self):
            reset_if_changed(self, reset)
        return result

    @contextlib.contextmanager
    def resetting(core: EngineCore) -> Iterator[None]:
        """What fails may have changed lists before; its error is the one to tell."""
        try:
            yield
        except Exception as error:
            # After a timeout the workers are busy; the next call looks.
            if ours(core) and not isinstance(error, TimeoutError):
                try:
                    reset_if_changed(core, reset)
                except Exception as second:
                    logger.warning("quads_nvfp4: after %r, too: %r", error, second)
            raise

    def stepping(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(self: EngineCore, *args: Any, **kwargs: Any) -> Any:
            retry_reset(self, reset)
            return original(self, *args, **kwargs)

        return step

    setattr(reset_prefix_cache, _PATCHED, True)
    EngineCore.reset_prefix_cache = reset_prefix_cache
    EngineCore.collective_rpc = collective_rpc
    EngineCore.wake_up = wake_up
    EngineCore.step = stepping(EngineCore.step)
    EngineCore.step_with_batch_queue = stepping(EngineCore.step_with_batch_queue)


def _patch_worker_wrapper() -> None:
    original = WorkerWrapperBase.execute_model
    if hasattr(original, _PATCHED):
        return

    @functools.wraps(original)
    def execute_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, _WEIGHTS_LOST, False):
            raise_if_lost(self.worker.model_runner.get_model(), "sleep level 2")
            setattr(self, _WEIGHTS_LOST, False)
        runtime = runtime_of(self)
        if runtime is None:
            return original(self, *args, **kwargs)
        scheduled = args[0] if args else kwargs["scheduler_output"]
        sampled = runtime.begin(scheduled.total_num_scheduled_tokens)
        try:
            return original(self, *args, **kwargs)
        finally:
            if sampled:
                runtime.end()

    def sleep(self: WorkerWrapperBase, level: int = 1) -> None:
        runtime = runtime_of(self.worker)
        if runtime is not None:
            runtime.count_staged()
        self.worker.sleep(level=level)
        quantized = self.worker.vllm_config.model_config.quantization == QUANT_METHOD
        if level == 2 and quantized and self.worker.device.type != "cpu":  # a CPU never sleeps
            mark_lost(self.worker.model_runner.get_model())
            setattr(self, _WEIGHTS_LOST, True)

    def wake_up(self: WorkerWrapperBase, tags: list[str] | None = None) -> None:
        self.worker.wake_up(tags=tags)
        if self.worker.vllm_config.model_config.quantization == QUANT_METHOD:
            quads_end_sync(self.worker)

    def load_model(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
        result = self.worker.load_model(*args, **kwargs)
        if self.worker.vllm_config.model_config.quantization == QUANT_METHOD:
            after_loading(self.worker)
        return result

    def reload_weights(self: WorkerWrapperBase, *args: Any, **kwargs: Any) -> Any:
        quantized = self.worker.vllm_config.model_config.quantization == QUANT_METHOD
        if quantized and not kwargs.get("is_checkpoint_format", True):
            raise ValueError(
                "quads_nvfp4 takes checkpoint-format weights: is_checkpoint_format=False would "
                "write into packed codes"
            )
        return self.worker.reload_weights(*args, **kwargs)

    setattr(execute_model, _PATCHED, True)
    WorkerWrapperBase.execute_model = execute_model
    WorkerWrapperBase.sleep = sleep  # reached through __getattr__ until now
    WorkerWrapperBase.wake_up = wake_up
    WorkerWrapperBase.load_model = load_model
    WorkerWrapperBase.reload_weights = reload_weights
