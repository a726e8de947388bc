"""``Compensator``: all compensated inputs of a model on one rank, and what happens at boundaries.

An engine adds its sites when it makes its layers, tells when weights arrive and when a sync ends,
and offers the public methods to its users. Between two boundaries nothing here changes a list.

A **boundary** is the end of a sync. With BF16 columns (``splice_weight="bf16"``) it is the sync's
first tensor that decides on the lists, because the columns are gathered while the weights load.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from quads_common.compensation.columns import SiteColumns
from quads_common.compensation.files import (
    SavedSelection,
    SitePart,
    read_selection_file,
    restore,
    snapshot,
    write_selection_file,
)
from quads_common.compensation.metrics import SiteMetrics, refresh_summary
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.refresh import SiteState, new_site_state, refresh, refresh_is_due
from quads_common.compensation.site import Site
from quads_common.compensation.statistics import reset

__all__ = ["Compensator", "Log"]


class Log(Protocol):
    """Where lines go: a ``logging.Logger``."""

    def info(self, message: str, *args: Any) -> None:
        """A line for every user."""

    def warning(self, message: str, *args: Any) -> None:
        """What a user should look into."""


class Compensator:
    """The sites of one rank. version: how often a selection changed; metrics: of the last refresh.

    tp_size: the engine's, which selection files belong to. selection_file: to start with.
    """

    def __init__(
        self,
        options: CompensationOptions,
        *,
        tp_size: int,
        log: Log,
        selection_file: str | None = None,
    ) -> None:
        self.options = options
        self.tp_size = tp_size
        self.version = 0
        self.boundaries = 0
        self.metrics: list[SiteMetrics] = []
        self._log = log
        self._states: dict[str, SiteState] = {}
        self._columns: dict[str, SiteColumns] = {}
        self._start_file = selection_file
        self._next_file: SavedSelection | None = None  # takes effect with the next sync's columns
        self._refresh_next = False  # asked for, waits for the same
        self._announced = False  # the sync that is going on ends with other lists
        self._loaded = False
        self._arriving = False

    @property
    def states(self) -> list[SiteState]:
        """In the order of the layers."""
        return list(self._states.values())

    @property
    def gathers_columns(self) -> bool:
        """Whether lists can change only while weights load."""
        return bool(self._columns)

    # What an engine does ------------------------------------------------------------------------

    def add(self, site: Site, device: torch.device) -> SiteState:
        """The buffers of an input. A name that comes again replaces the earlier site."""
        state = new_site_state(site, self.options, device)
        self._states[site.name] = state
        return state

    def add_columns(self, state: SiteState, units: int, rows: int) -> SiteColumns | None:
        """The BF16 columns of a site's ``units`` weights of ``rows`` rows; None if not wanted."""
        slots = state.selection.channels.shape[1]
        if self.options.splice_weight != "bf16" or slots == 0:
            return None
        columns = SiteColumns(state, units, rows, state.selection.channels.device)
        self._columns[state.site.name] = columns
        return columns

    def start_counting(self) -> None:
        """Warm-up is over: real rows are counted from now on."""
        for state in self.states:
            state.statistics.enabled.fill_(True)

    def weights_arrive(self) -> None:
        """Before each tensor of a quantized layer; only a sync's first one does anything."""
        if self._arriving:
            return
        self._arriving = True
        if not self.gathers_columns:
            return
        if not self._loaded:
            self._restore_start_file()
            return
        self.boundaries += 1
        if self._next_file is not None:
            saved, self._next_file, self._refresh_next = self._next_file, None, False
            self._announce(lambda: self._restore(saved))
        elif self._refresh_next or refresh_is_due(self.boundaries, self.options):
            self._refresh_next = False
            self._announce(self._refresh)

    def loaded(self) -> None:
        """The engine's first load is over."""
        self._arriving = False
        self._restore_start_file()
        self._loaded = True

    def end_sync(self) -> bool:
        """A boundary, if weights arrived since the last one; returns whether a list changed."""
        if not self._arriving:
            return False
        self._arriving = False
        if not self._loaded:
            return False
        before = self.version
        if self.gathers_columns:
            self._commit()
        else:
            self.boundaries += 1
            if refresh_is_due(self.boundaries, self.options):
                self._refresh()
        return self.version != before

    def checksum(self) -> dict[str, str]:
        """Digests of the lists that every rank must have alike: inputs that no rank shards."""
        shared = [s for s in self.states if s.site.shards == 1 and s.site.num_groups == 1]
        return {s.site.name: s.selection.checksum() for s in shared}

    # What users call ----------------------------------------------------------------------------

    def refresh_now(self) -> dict[str, Any]:
        """Choose the lists anew from what was counted; ends a sync that is going on.

        Returns "applied" (False if it waits for the next sync), "changed" and "metrics".
        """
        before = self.version
        self.end_sync()
        if self.gathers_columns:
            self._refresh_next = True
            self._log.info(
                "quads_nvfp4: BF16 columns exist only while weights load: the refresh takes effect "
                "with the next weight sync"
            )
            return {"applied": False, "changed": self.version != before, "metrics": []}
        self._refresh()
        found = [m.to_json() for m in self.metrics]
        return {"applied": True, "changed": self.version != before, "metrics": found}

    def forget(self) -> None:
        """Forget statistics and averages; the lists in force stay until the next refresh."""
        for state in self.states:
            reset(state.statistics)
            averages = state.averages
            for name in ("block", "block_known", "channel", "ready", "tokens"):
                getattr(averages, name).zero_()

    def save(
        self,
        path: str,
        gather: Callable[[list[SitePart]], Sequence[list[SitePart]] | None],
    ) -> int | None:
        """Write the selection file of all ranks; returns the number of sites, None elsewhere.

        gather: every rank's parts on the rank that writes, None on the others.
        """
        everyone = gather([snapshot(state) for state in self.states])
        if everyone is None:
            return None
        parts = [part for parts in everyone for part in parts]
        write_selection_file(path, parts, tp_size=self.tp_size, options=self.options)
        return len({part.site.name for part in parts})

    def load(self, path: str) -> dict[str, Any]:
        """Take over a selection file; "applied" is False if it waits for the next sync.

        Raises:
            ValueError: the file does not fit this engine; nothing was changed.
            OSError: it cannot be read.
        """
        saved = read_selection_file(path)
        self.end_sync()
        if not self.gathers_columns:
            self._restore(saved)
            return {"applied": True}
        kept = [_clones(state.buffers()) for state in self.states]
        restore(saved, self.states, tp_size=self.tp_size, options=self.options)  # would it fit?
        for state, buffers in zip(self.states, kept, strict=True):
            _write(state.buffers(), buffers)
        self._next_file = saved
        self._log.info(
            "quads_nvfp4: BF16 columns exist only while weights load: %s takes effect with the "
            "next weight sync",
            path,
        )
        return {"applied": False}

    # How ----------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        self.metrics = refresh(self.states, self.options)
        if any(m.blocks_overlap < 1 or m.channels_overlap < 1 for m in self.metrics):
            self.version += 1
        self._log.info("quads_nvfp4: selections refreshed: %s", refresh_summary(self.metrics))

    def _restore(self, saved: SavedSelection) -> None:
        restore(saved, self.states, tp_size=self.tp_size, options=self.options)
        self.version += 1
        self._log.info("quads_nvfp4: selections of %s", saved.path)

    def _restore_start_file(self) -> None:
        if self._start_file is not None:
            path, self._start_file = self._start_file, None
            self._restore(read_selection_file(path))

    def _announce(self, choose: Callable[[], None]) -> None:
        """Run what writes new lists, but leave the old ones in force until the sync ends."""
        sites = list(self._columns.values())
        old = [_clones(columns.state.selection.buffers()) for columns in sites]
        before = self.version
        choose()
        self._announced, self.version = self.version != before, before
        for columns, kept in zip(sites, old, strict=True):
            buffers = columns.state.selection.buffers()
            columns.announce(_clones(buffers))
            _write(buffers, kept)

    def _commit(self) -> None:
        late = [name for name, columns in self._columns.items() if not columns.commit()]
        if self._announced:
            self.version, self._announced = self.version + 1, False
        if late:
            self._log.warning(
                "quads_nvfp4: %d inputs keep their hot channels, because the sync did not bring "
                "all of their weights: %s",
                len(late),
                ", ".join(late[:4]) + (", ..." if len(late) > 4 else ""),
            )


def _clones(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in buffers.items()}


def _write(buffers: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, tensor in buffers.items():
        tensor.copy_(values[name])
