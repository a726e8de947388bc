"""Weight updates as the scheduler runs them: errors, boundaries, lost weights.

What quantizes is the parameters' own loaders (see ``loading``); here is what surrounds them.
"""

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from torch import nn

from quads_common.compensation.ranks import SelectionsDifferError
from quads_common.layer_weights import all_units, mark_lost, raise_if_lost, whole_update
from sglang_quads import compat
from sglang_quads.compensation import note_changes
from sglang_quads.loading import drain_errors, end_sync
from sglang_quads.refusals import check_load_format
from sglang_quads.report import config_of

__all__ = [
    "agree",
    "boundary",
    "changed_lists",
    "end_update",
    "forget_weights",
    "refuse_lost",
    "run_end_update",
    "run_tensor_request",
    "run_update",
]

logger = logging.getLogger(__name__)

_LOST = "quads_weights_lost"  # attribute of the model
WHOLE = ("disk", "ipc")  # updates that bring everything: they begin and end with a boundary


def run_update(
    kind: str, original: Callable[..., Any], owner: Any, *args: Any, **kwargs: Any
) -> Any:
    """An update function of SGLang's, with every error in its result, the same on all ranks.

    Left alone, an exception ends the scheduler, and the client hears of rank 0's errors only,
    though an expert may be another rank's. kind: "disk", "tensor", "distributed" or "ipc".

    What a failed call left half is dropped, lest it pair with the half of another update. It may
    have changed weights, while SGLang flushes the radix cache after a success only.
    """
    model = compat.updated_model(owner)
    config = config_of(model)
    if config is None:
        return original(owner, *args, **kwargs)
    model_config = compat.updated_model_config(owner)
    path = model_config.model_path
    units = all_units(model)
    if kind in WHOLE:
        boundary(model, f"update_weights_from_{kind}")
    before = [group.now for group in units]
    drain_errors()
    with whole_update(units) if kind == "disk" else contextlib.nullcontext() as incomplete:
        try:
            check_path(kind, args, kwargs)
            success, message = original(owner, *args, **kwargs)
        except Exception as error:  # told to the client, on every rank
            success, message = False, f"{type(error).__name__}: {error}"
        errors = drain_errors()
        try:
            for group in units:
                group.check()  # on a GPU NaN and Inf are looked for here
        except ValueError as error:
            errors.append(str(error))
        # With a filter of names a disk update is no whole one.
        if success and incomplete is not None and not names_filtered(args, kwargs):
            errors += filter(None, [incomplete()])
    if errors:
        success, message = False, "; ".join(errors)
    success, message = agree(success, message)
    if not success:
        for group, then in zip(units, before, strict=True):
            for sentence in group.drop_since(then):
                logger.warning("Incomplete weight update: %s", sentence)
        config.flush.ask("an update failed")
    if kind in WHOLE:
        changed_lists(model)
    if kind == "disk" and not success:
        model_config.model_path = path
    return success, message


def run_tensor_request(original: Callable[..., Any], worker: Any, request: Any) -> Any:
    """Tensors that cannot be read from a request, in its answer; SGLang's scheduler ends of them.

    On the other ranks ``run_update`` has or will come as far, and hears of it.
    """
    config = config_of(compat.updated_model(worker.model_runner))
    if config is None:
        return original(worker, request)
    try:
        return original(worker, request)
    except Exception as error:  # told to the client, on every rank
        config.flush.ask("an update failed")
        return agree(False, f"{type(error).__name__}: {error}")


def names_filtered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a disk update was told to leave names out (arguments without ``self``)."""
    return kwargs.get("weight_name_filter", args[2] if len(args) > 2 else None) is not None


def check_path(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse updates that bypass the parameters' loaders.

    Raises:
        ValueError: load format "direct" of tensors, or one that ``check_load_format`` refuses.
    """
    load_format = kwargs.get("load_format", args[1] if len(args) > 1 else None)
    if kind == "disk":
        check_load_format(load_format)
    if kind == "tensor" and load_format == "direct":
        raise ValueError(
            'quads_nvfp4 does not support load_format "direct", which copies into parameters '
            "without their loaders: leave it out"
        )


def agree(success: bool, message: str) -> tuple[bool, str]:
    """Success if all tensor-parallel ranks report it, else the messages of those that do not."""
    group = get_tp_group()
    if group.world_size == 1:
        return success, message
    answers: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(answers, (success, message), group=group.cpu_group)
    failures = dict.fromkeys(text for good, text in answers if not good)
    return (False, "; ".join(failures)) if failures else (True, message)


def run_end_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """0.5.23's end of an update session, with errors of its processing in the answer."""
    model = manager.tp_worker.model_runner.model
    if config_of(model) is None:
        return original(manager, request)
    drain_errors()
    result = original(manager, request)
    success, message = agree(not (errors := drain_errors()), "; ".join(errors))
    changed_lists(model)
    if not success:
        result.success, result.message = False, message
    return result


def end_update(model: nn.Module) -> list[str]:
    """End whatever update is going on; returns what was incomplete and dropped.

    It is a boundary for compensated inputs; ``changed_lists`` must follow on all ranks.

    Raises:
        ValueError: weights with NaN or Inf, by name; after the lists were dealt with.
    """
    config = config_of(model)
    try:
        return end_sync(all_units(model))
    finally:
        if config is not None and config.runtime is not None:
            config.runtime.compensator.end_sync()


def changed_lists(model: nn.Module) -> None:
    """Where a boundary may have been, on all ranks: whether the radix cache must be flushed."""
    config = config_of(model)
    if config is None or config.runtime is None:
        return
    try:
        note_changes(config.runtime, config.flush)
    except SelectionsDifferError as error:
        logger.error("quads_nvfp4: %s", error)


def boundary(model: nn.Module, what: str) -> None:
    """A flush, a release or a resume: drop and report what an update left incomplete."""
    if config_of(model) is None:
        return
    try:
        end_update(model)
    except ValueError as error:
        logger.error("quads_nvfp4: found at %s: %s", what, error)
    changed_lists(model)


def forget_weights(model: nn.Module, tags: list[str] | None, discards: bool) -> None:
    """After a release of memory; discards: whether what was in it is gone."""
    if config_of(model) is None or not discards or (tags and "weights" not in tags):
        return
    mark_lost(model)
    setattr(model, _LOST, True)


def refuse_lost(model: nn.Module) -> None:
    """Before a forward pass.

    Raises:
        WeightsLostError: units hold no weights since memory was released.
    """
    if getattr(model, _LOST, False):
        raise_if_lost(model, "release_memory_occupation")
        setattr(model, _LOST, False)
