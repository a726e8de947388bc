"""Worker methods of compensation, for ``collective_rpc`` in process and over HTTP.

llm.collective_rpc("quads_refresh")
llm.collective_rpc("quads_save_selection", args=("selection.safetensors",))
curl -X POST .../collective_rpc -d '{"method": "quads_refresh"}'
"""

from typing import Any

from vllm.distributed import get_tp_group

from quads_common.compensation.controller import Compensator
from quads_common.compensation.paths import probe
from quads_common.compensation.ranks import gather_parts
from quads_common.options import QUANT_METHOD
from vllm_quads.sync import runtime_of

__all__ = [
    "WORKER_METHODS",
    "quads_begin_calibration",
    "quads_end_calibration",
    "quads_forget",
    "quads_load_selection",
    "quads_metrics",
    "quads_probe_selection",
    "quads_refresh",
    "quads_save_selection",
    "quads_selection_state",
    "quads_undo_calibration",
]


def quads_refresh(worker: Any) -> dict[str, Any]:
    """Worker method: choose the lists anew; see ``Compensator.refresh_now``."""
    return _compensator(worker).refresh_now()


def quads_forget(worker: Any) -> None:
    """Worker method: forget all statistics; the lists in force stay until the next refresh."""
    _compensator(worker).forget()


def quads_begin_calibration(worker: Any) -> None:
    """Worker method: forget, with a copy; see ``Compensator.begin_calibration``."""
    _compensator(worker).begin_calibration()


def quads_end_calibration(worker: Any) -> None:
    """Worker method: a calibration succeeded: drop the copy."""
    _compensator(worker).end_calibration()


def quads_undo_calibration(worker: Any) -> bool:
    """Worker method: a calibration failed: bring the copy back; returns whether there was one."""
    return _compensator(worker).undo_calibration()


def quads_save_selection(worker: Any, path: str) -> dict[str, Any] | None:
    """Worker method: write a selection file; returns path and number of inputs on the first rank.

    path: where the first rank can write.
    """
    group = get_tp_group()
    return _compensator(worker).save(path, lambda parts: gather_parts(parts, group))


def quads_probe_selection(worker: Any, path: str) -> None:
    """Worker method: raise what ``quads_save_selection`` would, if it could not write there."""
    _compensator(worker)
    if get_tp_group().rank_in_group == 0:
        probe(path)


def quads_load_selection(worker: Any, path: str) -> dict[str, Any]:
    """Worker method: take over a selection file; see ``Compensator.load``.

    path: where every rank can read.
    """
    return _compensator(worker).load(path)


def quads_metrics(worker: Any) -> list[dict[str, Any]]:
    """Worker method: ``SiteMetrics`` of the last refresh, for each input of this rank."""
    return [metrics.to_json() for metrics in _compensator(worker).metrics]


def quads_selection_state(worker: Any) -> dict[str, Any] | None:
    """Worker method: how often the lists changed, and digests of those that ranks share.

    None where nothing is compensated.
    """
    runtime = runtime_of(worker)
    return None if runtime is None else runtime.compensator.state()


WORKER_METHODS = (
    quads_refresh,
    quads_forget,
    quads_begin_calibration,
    quads_end_calibration,
    quads_undo_calibration,
    quads_save_selection,
    quads_probe_selection,
    quads_load_selection,
    quads_metrics,
    quads_selection_state,
)


def _compensator(worker: Any) -> Compensator:
    runtime = runtime_of(worker)
    if runtime is None:
        options = getattr(worker.vllm_config.quant_config, "options", None)
        what = f"method {options.preset!r}" if options is not None else f"no {QUANT_METHOD}"
        raise ValueError(f"this engine compensates nothing: it was started with {what}")
    return runtime.compensator
