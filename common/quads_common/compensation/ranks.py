"""What tensor-parallel ranks tell each other: digests of shared lists, parts of a file."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from quads_common.compensation.files import SitePart

__all__ = ["Group", "SelectionsDifferError", "check_alike", "gather_parts"]


class SelectionsDifferError(RuntimeError):
    """Tensor parallel ranks hold different lists for an input that they share."""


class Group(Protocol):
    """The engines' tensor-parallel group. ranks: global ones. cpu_group: a process group."""

    world_size: int
    rank_in_group: int
    ranks: list[int]
    cpu_group: Any


def check_alike(states: Sequence[dict[str, Any]]) -> None:
    """Whether all ranks hold the same lists where they must; states: of ``Compensator.state``.

    Raises:
        SelectionsDifferError: the ranks' sums of the same layer would not belong together.
    """
    for rank, state in enumerate(states[1:], start=1):
        for site, digest in states[0]["shared"].items():
            if state["shared"].get(site) != digest:
                raise SelectionsDifferError(
                    f"{site}: rank {rank} chose other blocks or channels than rank 0: load one "
                    "selection file in all ranks (quads_load_selection) and report this"
                )


def gather_parts(parts: list[SitePart], group: Group) -> list[list[SitePart]] | None:
    """The parts of all ranks, on the first one; None elsewhere."""
    if group.world_size == 1:
        return [parts]
    everyone: list[Any] | None = [None] * group.world_size if group.rank_in_group == 0 else None
    torch.distributed.gather_object(parts, everyone, dst=group.ranks[0], group=group.cpu_group)
    return everyone
