"""The scheduler's side of a refresh: the prefix cache, and whether all ranks chose alike."""

from collections.abc import Callable
from typing import Any

from vllm.logger import init_logger

__all__ = ["SelectionsDifferError", "reset_if_changed"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own

_SEEN = "_quads_selection_versions"


class SelectionsDifferError(RuntimeError):
    """Tensor parallel ranks hold different lists for an input that they share."""


def reset_if_changed(core: Any, reset: Callable[[Any], bool]) -> None:
    """Reset an engine core's prefix cache if any rank's selection changed since the last time.

    reset: ``EngineCore.reset_prefix_cache``.

    Raises:
        SelectionsDifferError: the ranks' sums of the same layer would not belong together.
    """
    states = core.model_executor.collective_rpc("quads_selection_state")
    if not states or not all(states):
        return
    for rank, state in enumerate(states[1:], start=1):
        for site, digest in states[0]["shared"].items():
            if state["shared"].get(site) != digest:
                raise SelectionsDifferError(
                    f"{site}: rank {rank} chose other blocks or channels than rank 0: load one "
                    "selection file in all ranks (quads_load_selection) and report this"
                )
    versions = [state["version"] for state in states]
    before = getattr(core, _SEEN, [state["start_version"] for state in states])
    setattr(core, _SEEN, versions)
    if versions != before and not reset(core):
        logger.warning(
            "quads_nvfp4: the selection changed while requests were running: what they have in the "
            "prefix cache was computed with the one before"
        )
