"""Every hook into SGLang's own functions, applied by its hook registry.

1. The resolution of ``ServerArgs``: options of ``SGLANG_QUADS_CONFIG`` with "enable" for trainers
   that pass no engine options through, and refusals before a process is started.
2. ``ModelConfig._verify_quantization``: the same switch where ``ServerArgs`` was built before
   plugins were loaded; errors of options.
3. ``_get_quantization_config``, ``_initialize_model``, ``ModelRunner.load_model``: SGLang hands a
   quantization config nothing of the model, and models drop names that they do not know.
4. The update functions, and ``end_weight_update`` where there is one: their errors.
5. ``WeightChecker.handle``: fingerprints, the report and the end of a sync (``client``).
6. Cache flush, release and resume of memory: boundaries, lost weights, kernels that still run.
7. ``ModelRunner.forward``: lost weights; how many rows are tokens. ``Scheduler.flush_cache`` and
   ``.get_next_batch_to_run``: the radix cache holds results of another model once lists changed.
   ``GenerateReqInput.normalize_batch_and_arguments``: a server's own warm-up is not counted.
"""

import fnmatch
import functools
import hashlib
import json
import logging
import uuid
from typing import Any

import torch
from sglang.srt.model_loader.utils import get_model_architecture
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from quads_common.backend import general_backend
from quads_common.options import OPTION_KEYS, QUANT_METHOD
from sglang_quads import actions, compat, sync
from sglang_quads.compensation import WARM_UP, next_batch, real_tokens
from sglang_quads.config import (
    ENVIRONMENT_VARIABLE,
    QuadsNvfp4Config,
    environment_options,
    options_of,
)
from sglang_quads.loading import watch_load_weights
from sglang_quads.refusals import check_model, check_server_args
from sglang_quads.report import after_loading, config_of

__all__ = ["register", "targets"]

logger = logging.getLogger(__name__)

MISPLACED = ("quads", QUANT_METHOD, "quant_method")  # not options, but meant to be
_LOADER = "sglang.srt.model_loader.loader"
_REQUEST = "sglang.srt.managers.io_struct.GenerateReqInput"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register() -> None:
    """Register all of them; SGLang applies them after all plugins ran."""
    for target, (kind, hook) in _hooks().items():
        for each, function in zip(kind, hook, strict=True):
            HookRegistry.register(target, function, each)


def targets() -> list[str]:
    """Dotted names of everything that is hooked in this version."""
    return list(_hooks())


def _hooks() -> dict[str, tuple[tuple[HookType, ...], tuple[Any, ...]]]:
    before, after, around = HookType.BEFORE, HookType.AFTER, HookType.AROUND
    release, resume = compat.memory_targets()
    found: dict[str, tuple[tuple[HookType, ...], tuple[Any, ...]]] = {
        compat.resolve_target(): ((before, after), (enable_in_server_args, refuse_features)),
        "sglang.srt.configs.model_config.ModelConfig._verify_quantization": (
            (before, after),
            (enable_in_model_config, check_options),
        ),
        f"{_LOADER}._get_quantization_config": ((after,), (prepare,)),
        f"{_LOADER}._initialize_model": ((after,), (watch,)),
        f"{_RUNNER}.load_model": ((before, after), (check_before_loading, report_loading)),
        f"{_RUNNER}.forward": ((around,), (run_forward,)),
        "sglang.srt.utils.weight_checker.WeightChecker.handle": ((around,), (answer_questions,)),
        compat.flush_target(): ((before,), (end_at_flush,)),
        release: ((before, after), (end_at_release, forget_released)),
        resume: ((after,), (end_at_resume,)),
        f"{_SCHEDULER}.flush_cache": ((after,), (note_flush,)),
        f"{_SCHEDULER}.get_next_batch_to_run": ((around,), (flush_changed,)),
        f"{_REQUEST}.normalize_batch_and_arguments": ((before,), (name_warm_up,)),
    }
    for target, kind in compat.update_targets().items():
        found[target] = ((around,), (functools.partial(sync.run_update, kind),))
    found[compat.tensor_request_target()] = ((around,), (sync.run_tensor_request,))
    static_state = compat.static_state_target()
    if static_state is not None:
        found[static_state] = ((after,), (wait_for_kernels,))
    end_update = compat.end_update_target()
    if end_update is not None:
        found[end_update] = ((around,), (sync.run_end_update,))
    return found


def enable_in_server_args(args: Any, *_: Any, **__: Any) -> None:
    """Switch the method on if the environment says so; refuse what was asked for by name.

    Raises:
        ValueError: a feature that does not work, or an overriding quantization_config that is no
            object (SGLang dies of it).
    """
    if enabled_for(args.model_path) and args.quantization is None:
        switch_on(args, args.model_path)
    if args.quantization == QUANT_METHOD:
        check_override(args.json_model_override_args)
        check_server_args(args)
        # Fusion would put shared experts, which placement keeps, among the quantized ones. 0.5.20's
        # children get a record that holds this already and takes no assignment.
        if not args.disable_shared_experts_fusion:
            args.disable_shared_experts_fusion = True


def check_override(text: Any) -> None:
    """What ``--json-model-override-args`` holds: SGLang ignores keys that it does not know.

    Raises:
        ValueError: it or its quantization_config is no object, quant_method there no text, or
            options stand beside it.
    """
    try:
        override = json.loads(text or "{}")
    except (TypeError, ValueError):
        return  # SGLang's own error says so
    if not isinstance(override, dict):
        raise ValueError(f"--json-model-override-args must be an object, got {override!r:.80}")
    for key in override:
        if key in OPTION_KEYS or key in MISPLACED:
            raise ValueError(
                f"--json-model-override-args: {key!r} has no effect there: options of "
                f"{QUANT_METHOD} belong into its quantization_config, as in "
                """'{"quantization_config": {"method": "quads"}}'"""
            )
    section = override.get("quantization_config")
    if section is not None and not isinstance(section, dict):
        raise ValueError(f"quantization_config must be an object, got {section!r}")
    if section is not None and not isinstance(section.get("quant_method", QUANT_METHOD), str):
        raise ValueError(
            f"quantization_config: quant_method must be {QUANT_METHOD!r} or left out, got "
            f"{section['quant_method']!r}"
        )


def refuse_features(_: Any, args: Any, *__: Any, **___: Any) -> None:
    """The same for what SGLang chose for this model and machine."""
    if args.quantization == QUANT_METHOD:
        check_server_args(args)


def enabled_for(model_path: Any) -> bool:
    """Whether ``SGLANG_QUADS_CONFIG`` would switch the method on for a model.

    Raises:
        ValueError: "enable" or "model" of the wrong type.
    """
    options = environment_options()
    enable, pattern = options.get("enable", False), options.get("model", "*")
    if not isinstance(enable, bool) or not isinstance(pattern, str):
        raise ValueError(
            f'{ENVIRONMENT_VARIABLE}: "enable" must be true or false and "model" a path pattern, '
            f"got {enable!r} and {pattern!r}"
        )
    return enable and fnmatch.fnmatch(str(model_path), pattern)


def switch_on(config: Any, model_path: Any) -> None:
    """Make it the method of ``ServerArgs`` or of a ``ModelConfig``."""
    config.quantization = QUANT_METHOD
    logger.info("%s switches on quads_nvfp4 for %s", ENVIRONMENT_VARIABLE, model_path)


@functools.cache
def warn_of_options_without_method(keys: str) -> None:
    """Once: what the environment variable holds has no effect."""
    logger.warning(
        '%s holds %s, but quads_nvfp4 is not in use: give --quantization quads_nvfp4, or "enable": '
        'true there ("enable": false if that is meant)',
        ENVIRONMENT_VARIABLE,
        keys,
    )


def enable_in_model_config(config: Any) -> None:
    """The same for a ``ServerArgs`` that was built without this plugin; note what was asked for."""
    enabled = enabled_for(config.model_path)
    if config.quantization is None and model_section(config) is None:
        options = environment_options()
        if enabled:
            switch_on(config, config.model_path)
        elif options and "enable" not in options:
            warn_of_options_without_method(", ".join(map(repr, options)))
    if config.quantization == QUANT_METHOD:
        config.quads_requested = True


def check_options(_: Any, config: Any) -> None:
    """Errors of options at the first look at the model, before a process is started.

    Raises:
        ValueError: an option error; or another method took the request for this one over.
    """
    if config.quantization == QUANT_METHOD:
        options_of(model_section(config) or {})
    elif getattr(config, "quads_requested", False):
        raise ValueError(
            f"{QUANT_METHOD} was asked for, but the checkpoint's quantization_config made it "
            f"{config.quantization}: give it a BF16 checkpoint"
        )


def model_section(config: Any) -> Any:
    """The quantization_config of the model or of what overrides it; None without one."""
    return getattr(config.hf_config, "quantization_config", None)


def prepare(result: Any, model_config: Any, load_config: Any, *_: Any, **__: Any) -> None:
    """Complete our configuration, once SGLang has made it.

    Raises:
        RuntimeError: SGLang did not apply one of the hooks, or loads a model in some other way
            than ``ModelRunner.load_model``.
    """
    if not isinstance(result, QuadsNvfp4Config):
        return
    if missing := compat.missing(targets()):
        raise RuntimeError(
            f"quads_nvfp4: SGLang did not apply the hooks on {missing}; its log says why"
        )
    server_args = getattr(model_config, "quads_server_args", None)
    if server_args is None:
        raise RuntimeError(
            "quads_nvfp4: a model is loaded by something else than SGLang's ModelRunner.load_model"
        )
    model_class, _name = get_model_architecture(model_config)
    result.prepare(model_config, load_config, model_class, server_args)


def watch(model: Any, model_config: Any, load_config: Any, quant_config: Any = None) -> None:
    """Tie our configuration to the new model and watch what it loads."""
    if isinstance(quant_config, QuadsNvfp4Config):
        model.quads_config = quant_config
        watch_load_weights(model)


def check_before_loading(runner: Any) -> None:
    """Refuse features also where ``ServerArgs`` was built without this plugin."""
    if runner.model_config.quantization == QUANT_METHOD:
        check_server_args(runner.server_args)
        runner.model_config.quads_server_args = runner.server_args


def report_loading(_: Any, runner: Any) -> None:
    """Check and log what was quantized."""
    config = config_of(runner.model)
    if config is not None:
        dtype = str(runner.model_config.dtype).removeprefix("torch.")
        backend = general_backend(config.backend)
        check_model(runner.server_args, dtype, backend, config.options.act)
        after_loading(runner.model)


def run_forward(original: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Never run on what lies where weights were; say which rows of the batch may be counted."""
    sync.refuse_lost(runner.model)
    config = config_of(runner.model)
    if config is None or config.runtime is None:
        return original(runner, *args, **kwargs)
    runtime = config.runtime
    batch = args[0] if args else kwargs["forward_batch"]
    sampled = runtime.begin(real_tokens(batch, runtime.max_tokens))
    try:
        return original(runner, *args, **kwargs)
    finally:
        if sampled:
            runtime.end()


def answer_questions(
    original: Any, checker: Any, action: str, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Our actions of ``check_weights``; the others are SGLang's."""
    if not actions.is_ours(action):
        return original(checker, action, *args, **kwargs)
    checksums = actions.answer(compat.checked_model(checker), action)
    text = json.dumps(checksums, sort_keys=True).encode()
    return {
        "checksums": checksums,
        "per_gpu_checksum": hashlib.sha256(text).hexdigest(),
        "parallelism_info": compat.parallelism_info(checker, kwargs),
    }


def end_at_flush(owner: Any, *_: Any, **__: Any) -> None:
    """An explicit flush ends an update. The flush after an update's bucket does not pass here."""
    scheduler = owner if hasattr(owner, "tp_worker") else owner._flush_cache.__self__
    sync.boundary(scheduler.tp_worker.model_runner.model, "flush_cache")


def end_at_release(manager: Any, *_: Any, **__: Any) -> None:
    """A release ends an update that was going on, while its memory is there."""
    sync.boundary(manager.tp_worker.model_runner.model, "release_memory_occupation")
    wait_for_kernels()


def wait_for_kernels(*_: Any, **__: Any) -> None:
    """SGLang unmaps memory without waiting for what still reads it: a forward that the overlap
    scheduler ran for a request that had ended, the copies of the model's buffers
    (sgl-project/sglang#37932)."""
    if compat.device_type() == "cuda":
        torch.cuda.synchronize()


def forget_released(_: Any, manager: Any, request: Any) -> None:
    """Weights are gone after a release with the memory saver, unless it keeps a copy."""
    runner = manager.tp_worker.model_runner
    args = runner.server_args
    discards = bool(args.enable_memory_saver) and not args.enable_weights_cpu_backup
    discards = discards and compat.device_type() != "cpu"  # where the memory saver does nothing
    sync.forget_weights(runner.model, request.tags, discards)


def end_at_resume(_: Any, manager: Any, request: Any) -> None:
    """A resume ends an update that was going on."""
    sync.boundary(manager.tp_worker.model_runner.model, "resume_memory_occupation")


def flush_changed(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Flush what changed lists, or an update that failed, made stale, before it is looked up."""
    config = config_of(scheduler.tp_worker.model_runner.model)
    if config is None:
        return original(scheduler, *args, **kwargs)
    return next_batch(original, scheduler, config.flush, *args, **kwargs)


def note_flush(success: bool, scheduler: Any, *_: Any, **__: Any) -> None:
    """Whoever flushed the cache."""
    config = config_of(scheduler.tp_worker.model_runner.model)
    if success and config is not None:
        config.flush.due = ""


def name_warm_up(request: Any) -> None:
    """Requests that an HTTP server sends itself before it is up get ids that are not counted."""
    if request.rid is None and compat.warming_up():
        request.rid = f"{WARM_UP}-{uuid.uuid4().hex}"
