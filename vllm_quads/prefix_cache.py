"""The scheduler's side of a refresh: the prefix cache, and whether all ranks chose alike.

vLLM resets its prefix cache only while no request holds a part of it. So a reset may have to wait:
until it succeeded it is tried again before each step that finds no request running.
"""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

from quads_common.compensation.ranks import SelectionsDifferError, check_alike

__all__ = ["SelectionsDifferError", "reset_after_change", "reset_if_changed", "retry_reset"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own

_SEEN = "_quads_selection_versions"  # of the workers, when the cache was reset last
_WAITING = "_quads_selection_versions_waiting"  # for a reset; None if there is none to come

Reset = Callable[[Any], bool]  # ``EngineCore.reset_prefix_cache``


def reset_if_changed(core: Any, reset: Reset) -> None:
    """Reset an engine core's prefix cache if a rank's selection changed since it was reset last.

    Raises:
        SelectionsDifferError: the ranks' sums of the same layer would not belong together.
    """
    versions = _changed_versions(core)
    told = getattr(core, _WAITING, None)
    if versions is not None and (versions != told or not core.scheduler.running):
        _reset(core, reset, versions)


def reset_after_change(core: Any, reset: Reset) -> bool:
    """Reset the prefix cache in any case, as a user asked; returns what ``reset`` returns.

    Raises:
        SelectionsDifferError: as above.
    """
    versions = _changed_versions(core)
    return reset(core) if versions is None else _reset(core, reset, versions)


def retry_reset(core: Any, reset: Reset) -> None:
    """Before a step: a reset that had to wait, if nothing runs any more."""
    versions = getattr(core, _WAITING, None)
    if versions is not None and not core.scheduler.running:
        _reset(core, reset, versions)


def _changed_versions(core: Any) -> list[int] | None:
    """The versions of all ranks; None if they are those of the last reset."""
    states = core.model_executor.collective_rpc("quads_selection_state")
    if not states or not all(states):
        return None
    check_alike(states)
    versions = [state["version"] for state in states]
    return None if versions == getattr(core, _SEEN, _start_versions(states)) else versions


def _start_versions(states: list[dict[str, Any]]) -> list[int]:
    return [state["start_version"] for state in states]


def _reset(core: Any, reset: Reset, versions: list[int]) -> bool:
    done = reset(core)
    if done:
        setattr(core, _SEEN, versions)
        setattr(core, _WAITING, None)
        return True
    cached = core.vllm_config.cache_config.enable_prefix_caching
    if cached and getattr(core, _WAITING, None) != versions:
        logger.warning(
            "quads_nvfp4: the selection changed while requests were running: they go on with keys "
            "and values that were computed with the one before, and until none runs new requests "
            "find those in the prefix cache too; then it is reset. "
            "reset_prefix_cache(reset_running_requests=True) resets it at once"
        )
    setattr(core, _WAITING, versions)
    return False
