"""Questions and orders to a running engine: fingerprints, the end of a sync, selections.

They travel through ``check_weights`` (HTTP: ``POST /weights_checker {"action": ...}``), the one
call of SGLang that returns something from every tensor-parallel rank.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from quads_common.compensation.paths import path_text
from quads_common.fingerprint import combine_ranks

__all__ = [
    "ask",
    "decode",
    "end_sync",
    "fingerprints",
    "forget",
    "load_selection",
    "metrics",
    "refresh",
    "report",
    "save_selection",
]


def fingerprints(engine: Any) -> dict[str, str]:
    """Digest of every quantized tensor of a ``sglang.Engine``, by checkpoint name.

    Compare with ``quads_common.qat.fingerprints`` of the trainer's model by
    ``quads_common.fingerprint.differing``. Over HTTP: ``combine_ranks(decode(action, answer))``.
    """
    return combine_ranks(ask(engine, "quads_fingerprints"))


def report(engine: Any) -> list[dict[str, Any]]:
    """What was quantized, by rank."""
    return ask(engine, "quads_report")


def end_sync(engine: Any) -> list[list[str]]:
    """End the update that is going on; by rank, one sentence for each unit that was incomplete."""
    return ask(engine, "quads_end_sync")


def refresh(engine: Any) -> list[dict[str, Any]]:
    """Choose the lists anew from what was counted; by rank applied, changed and metrics."""
    return ask(engine, "quads_refresh")


def forget(engine: Any) -> None:
    """Forget all statistics; the lists in force stay until the next refresh."""
    ask(engine, "quads_forget")


def metrics(engine: Any) -> list[list[dict[str, Any]]]:
    """Of the last refresh, for each input of each rank."""
    return ask(engine, "quads_metrics")


def save_selection(engine: Any, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Write a selection file where the first rank can; returns its absolute path and the number of
    inputs."""
    return ask(engine, "quads_save_selection", path)[0]


def load_selection(engine: Any, path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Take over a selection file that every rank can read; by rank whether it is applied."""
    return ask(engine, "quads_load_selection", path)


def ask(engine: Any, name: str, *path: str | os.PathLike[str]) -> list[Any]:
    """One of ``actions`` to an engine in this process; answers by rank.

    Raises:
        RuntimeError: the engine reports an error.
        ValueError: no path.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqInput

    action = " ".join([name, *map(path_text, path)])
    request = CheckWeightsReqInput(action=action)
    call = engine.tokenizer_manager.check_weights(request, None)
    success, message, ranks, *_ = engine.loop.run_until_complete(call)
    return decode(action, {"success": success, "message": message, "ranks": ranks})


def decode(action: str, answer: Mapping[str, Any]) -> list[Any]:
    """Answers by rank from the body that ``/weights_checker`` returns.

    Raises:
        RuntimeError: it reports an error.
    """
    if not answer["success"]:
        name = action.partition(" ")[0]  # the message names the path
        raise RuntimeError(f"{name}: {answer['message']}")
    found: list[Any] = []
    payloads: Sequence[Any] = answer["ranks"]
    for payload in payloads:
        found += json.loads(payload["checksums"][action])
    return found
