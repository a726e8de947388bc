"""Our actions of SGLang's ``check_weights``: its one call that returns something from every rank.

An action is a name, for some followed by a space and a path. ``client`` is the other side.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from torch import nn

from quads_common.compensation.controller import Compensator
from quads_common.compensation.paths import probe
from quads_common.compensation.ranks import gather_parts
from quads_common.layer_weights import partial_fingerprints
from quads_common.options import QUANT_METHOD
from sglang_quads import compat
from sglang_quads.report import config_of, model_report
from sglang_quads.sync import agree, changed_lists, end_update

__all__ = ["ACTIONS", "answer", "is_ours"]


def quads_refresh(model: nn.Module) -> dict[str, Any]:
    """Choose the lists anew; see ``Compensator.refresh_now``."""
    return _compensator(model).refresh_now()


def quads_forget(model: nn.Module) -> None:
    """Forget all statistics; the lists in force stay until the next refresh."""
    _compensator(model).forget()


def quads_begin_calibration(model: nn.Module) -> None:
    """Forget all statistics, with a copy; see ``Compensator.begin_calibration``."""
    _compensator(model).begin_calibration()


def quads_end_calibration(model: nn.Module) -> None:
    """A calibration succeeded: drop the copy."""
    _compensator(model).end_calibration()


def quads_undo_calibration(model: nn.Module) -> bool:
    """A calibration failed: bring the copy back; returns whether there was one."""
    return _compensator(model).undo_calibration()


def quads_metrics(model: nn.Module) -> list[dict[str, Any]]:
    """``SiteMetrics`` of the last refresh, for each input of this rank."""
    return [metrics.to_json() for metrics in _compensator(model).metrics]


def quads_selection_state(model: nn.Module) -> dict[str, Any] | None:
    """``Compensator.state``; None where nothing is compensated."""
    config = config_of(model)
    return None if config is None or config.runtime is None else config.runtime.compensator.state()


def quads_save_selection(model: nn.Module, path: str) -> dict[str, Any] | None:
    """Write a selection file; returns path and number of inputs on the first rank."""
    group = get_tp_group()
    return _compensator(model).save(path, lambda parts: gather_parts(parts, group))


def quads_probe_selection(model: nn.Module, path: str) -> None:
    """Raise what ``quads_save_selection`` would, if it could not write there."""
    _compensator(model)
    if get_tp_group().rank_in_group == 0:
        probe(path)


def quads_load_selection(model: nn.Module, path: str) -> dict[str, Any]:
    """Take over a selection file that every rank can read; see ``Compensator.load``."""
    return _compensator(model).load(path)


ACTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "quads_fingerprints": partial_fingerprints,
    "quads_report": model_report,
    "quads_end_sync": end_update,
    "quads_refresh": quads_refresh,
    "quads_forget": quads_forget,
    "quads_begin_calibration": quads_begin_calibration,
    "quads_end_calibration": quads_end_calibration,
    "quads_undo_calibration": quads_undo_calibration,
    "quads_metrics": quads_metrics,
    "quads_selection_state": quads_selection_state,
}
WITH_PATH: dict[str, Callable[[nn.Module, str], Any]] = {
    "quads_save_selection": quads_save_selection,
    "quads_probe_selection": quads_probe_selection,
    "quads_load_selection": quads_load_selection,
}
_PREFIX = "quads_"


def is_ours(action: str) -> bool:
    """Whether an action of ``check_weights`` is meant for this: one of these, or one misspelt."""
    return action.startswith(_PREFIX)


def answer(model: nn.Module, action: str) -> dict[str, str]:
    """What ``check_weights`` returns as "checksums": SGLang's schema wants a map of strings.

    Raises:
        RuntimeError: on all ranks alike, whichever failed; SGLang would wait for the others.
    """
    group = get_tp_group()
    value: Any = None
    good, message = True, ""
    try:
        value = _call(model, action)
    except Exception as error:  # told to the client, on every rank
        good, message = False, f"{type(error).__name__}: {error}"
    good, message = agree(good, message)
    changed_lists(model)
    if not good:
        raise RuntimeError(message)
    ranks: list[Any] = [value]
    if not compat.answers_for_all_ranks() and group.world_size > 1:
        ranks = [None] * group.world_size
        torch.distributed.all_gather_object(ranks, value, group=group.cpu_group)
    return {action: json.dumps(ranks)}


def _call(model: nn.Module, action: str) -> Any:
    name, _, path = action.partition(" ")
    if name in ACTIONS:
        if action != name:
            raise ValueError(f"{name} takes nothing after its name, got {action!r}")
        return ACTIONS[name](model)
    if name not in WITH_PATH:
        allowed = [*ACTIONS, *(f"{known} PATH" for known in WITH_PATH)]
        raise ValueError(f"action {name!r:.80} is not allowed: one of {allowed}")
    if not path.strip():
        raise ValueError(f"{name} needs a path: {name} PATH")
    return WITH_PATH[name](model, path)


def _compensator(model: nn.Module) -> Compensator:
    config = config_of(model)
    if config is None or config.runtime is None:
        what = f"no {QUANT_METHOD}" if config is None else f"method {config.options.preset!r}"
        raise ValueError(f"this engine compensates nothing: it was started with {what}")
    return config.runtime.compensator
