"""Lists that wait for a sync: BF16 columns exist only while weights load.

They are chosen in the buffers of the sites, then kept here with those in force brought back. When
the sync's first tensor arrives they are announced to the sites' columns, and when it ends they come
into force where all columns came.
"""

from collections.abc import Callable, Iterator

import torch

from quads_common.compensation.columns import SiteColumns
from quads_common.compensation.state import (
    SiteState,
    clones,
    forget_served,
    lists_that_differ,
    with_lists,
)
from quads_common.compensation.statistics import copy_into

__all__ = ["PendingLists"]


class PendingLists:
    """Of all sites, by name. states, columns: the owner's, which may grow.

    lists: ``Selection.buffers`` of each site, in order; None if none wait. differ: whether they are
    new.
    """

    def __init__(self, states: dict[str, SiteState], columns: dict[str, SiteColumns]) -> None:
        self.lists: list[dict[str, torch.Tensor]] | None = None
        self.differ = False
        self._states = states
        self._columns = columns

    def choose(self, write_lists: Callable[[], bool]) -> None:
        """Run what writes new lists and returns whether they differ; those in force stay."""
        in_force = self._swap(None)
        try:
            differ = write_lists()
            chosen = self._swap(None)
        finally:
            self._swap(in_force)
        self.lists, self.differ = chosen, differ

    def announce(self) -> None:
        """A sync begins: columns are gathered for the lists that wait, too."""
        if self.lists is None:
            return
        for name, lists in zip(self._states, self.lists, strict=True):
            if name in self._columns:
                self._columns[name].announce(lists)

    def states(self) -> Iterator[SiteState]:
        """As they would be if the lists were in force, one after the other."""
        if self.lists is None:
            yield from self._states.values()
            return
        for state, lists in zip(self._states.values(), self.lists, strict=True):
            yield with_lists(state, lists)

    def commit(self) -> list[str]:
        """Put the lists in force, also where there are no columns; they wait no longer.

        Returns the names of the sites that keep theirs, because not all columns came whole.

        Raises:
            RuntimeError: none wait.
        """
        chosen, self.lists = self.lists, None
        if chosen is None:
            raise RuntimeError("no lists wait for a sync")
        late = []
        for (name, state), lists in zip(self._states.items(), chosen, strict=True):
            columns = self._columns.get(name)
            moved = lists_that_differ(lists["channels"], state)
            if columns is None:
                copy_into(state.selection.buffers(), lists, name)
            elif not columns.commit():
                late.append(name)
                continue
            forget_served(state, moved)
        return late

    def _swap(self, lists: list[dict[str, torch.Tensor]] | None) -> list[dict[str, torch.Tensor]]:
        """Write the lists of all sites, if any; returns those that were there."""
        selections = [state.selection.buffers() for state in self._states.values()]
        old = [clones(buffers) for buffers in selections]
        for buffers, new in zip(selections, lists or [], strict=False):
            for name, tensor in buffers.items():
                tensor.copy_(new[name])
        return old
