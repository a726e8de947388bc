"""``Compensator``: all compensated inputs of a model on one rank, and what happens at boundaries.

An engine adds its sites when it makes its layers, tells when weights arrive and when a sync ends,
and offers the public methods to its users. Between two boundaries nothing here changes a list.

A **boundary** is the end of a sync. With BF16 columns (``splice_weight="bf16"``) lists are chosen
at the latest when a sync's first tensor arrives, because the columns are gathered while the weights
load, and come into force when the sync ends.
"""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from quads_common.compensation.backup import Backup, bring_back, take_backup
from quads_common.compensation.columns import SiteColumns
from quads_common.compensation.files import (
    SitePart,
    fitting_parts,
    read_selection_file,
    snapshot,
    write_parts,
    write_selection_file,
)
from quads_common.compensation.metrics import SiteMetrics, refresh_summary, with_last_known
from quads_common.compensation.options import KINDS, CompensationOptions
from quads_common.compensation.paths import absolute
from quads_common.compensation.pending import PendingLists
from quads_common.compensation.refresh import refresh, refresh_is_due
from quads_common.compensation.selection import checksums
from quads_common.compensation.site import Site
from quads_common.compensation.state import SiteState, new_site_state
from quads_common.compensation.statistics import reset
from quads_common.weight_tiles import TileLayout

__all__ = ["Compensator", "Log"]


class Log(Protocol):
    """Where lines go: a ``logging.Logger``."""

    def info(self, message: str, *args: Any) -> None:
        """A line for every user."""

    def warning(self, message: str, *args: Any) -> None:
        """What a user should look into."""


class Compensator:
    """The sites of one rank. version: how often a selection changed; metrics: of the last
    refresh, with the last known energies where it had no row to measure them by.

    tp_size: the engine's, which selection files belong to. selection_file: to start with.
    first_rank: the one that writes INFO lines. on_refresh: called with the metrics of each refresh.
    count_staged: called before anything reads or replaces statistics or lists; whoever stages rows
    sets it.
    """

    def __init__(
        self,
        options: CompensationOptions,
        *,
        tp_size: int,
        log: Log,
        selection_file: str | None = None,
        first_rank: bool = True,
        on_refresh: Callable[[list[SiteMetrics]], object] | None = None,
    ) -> None:
        self.options = options
        self.tp_size = tp_size
        self.version = 0
        self.boundaries = 0
        self.metrics: list[SiteMetrics] = []
        self._last_known: dict[str, SiteMetrics] = {}  # since rows were forgotten, by site
        self.count_staged: Callable[[], object] = lambda: None  # nobody stages rows
        self._log = log
        self._first_rank = first_rank
        self._on_refresh = on_refresh
        self._state: dict[str, Any] = {}
        self._states: dict[str, SiteState] = {}
        self._columns: dict[str, SiteColumns] = {}
        self._rows: dict[str, int] = {}  # of each site's weights
        self._warned: set[str] = set()  # kinds whose splice count is too large
        self._start_file = selection_file
        self._pending = PendingLists(self._states, self._columns)  # with BF16 columns
        self._backup: Backup | None = None  # while a calibration runs
        self._loaded = False
        self._arriving = False
        self._arrived = False  # at least once
        self._arrival = threading.Lock()

    @property
    def states(self) -> list[SiteState]:
        """Of the inputs that are compensated, in the order of the layers."""
        return list(self._states.values())

    @property
    def gathers_columns(self) -> bool:
        """Whether lists can change only while weights load."""
        return bool(self._columns)

    # What an engine does ------------------------------------------------------------------------

    def add(self, site: Site, device: torch.device) -> SiteState:
        """The buffers of an input. A name that comes again replaces the earlier site.

        One that the options do not compensate has buffers for the layer, but is no business here.
        """
        state = new_site_state(site, self.options, device)
        if self.options.active(site.kind):
            self._states[site.name] = state
            self._check_splice_count(site)
        return state

    def add_columns(
        self, state: SiteState, units: int, rows: int, layout: TileLayout | None = None
    ) -> SiteColumns | None:
        """The BF16 columns of a site's ``units`` weights of ``rows`` rows; None if not wanted.

        layout: the weights' memory order.
        """
        self._rows[state.site.name] = rows
        slots = state.selection.channels.shape[1]
        if self.options.splice_weight != "bf16" or slots == 0:
            return None
        columns = SiteColumns(state, units, rows, state.selection.channels.device, layout)
        self._columns[state.site.name] = columns
        return columns

    def weights_arrive(self) -> None:
        """Before each tensor of a quantized layer; only a sync's first one does anything.

        Engines may load in threads: the others wait until the first one's has been done.
        """
        with self._arrival:
            if not self._arriving:
                self._arriving = self._arrived = True
                self._begin_sync()

    def _begin_sync(self) -> None:
        if not self.gathers_columns:
            return
        if not self._loaded:
            self._restore_start_file()
            return
        self.boundaries += 1
        if self._pending.lists is None and refresh_is_due(self.boundaries, self.options):
            self._pending.choose(self._refresh)
        self._pending.announce()

    def loaded(self) -> None:
        """The engine's first load is over."""
        if not self._arrived:  # dummy weights: engines write random values into every tensor
            self.forget()
        self._arriving = False
        self._restore_start_file()
        self._loaded = True
        self._state = {"start_version": self.version}
        self._note_state()

    def end_sync(self) -> bool:
        """A boundary, if weights arrived since the last one; returns whether a list changed."""
        before = self.version
        self._end_sync()
        return self.version != before

    def state(self) -> dict[str, Any]:
        """What ranks are compared by, without touching the device.

        version and start_version: now and when the engine had loaded. shared: digests of the lists
        of inputs that no rank shards, which every rank must have alike. calibration_passes: see
        ``calibration_passes``.
        """
        return self._state

    @property
    def calibration_passes(self) -> int:
        """How often to run prompts: RAC's blocks are ranked by what the hot channels leave.

        With BF16 columns that is seen only after the sync that puts the hot channels in force.
        """
        chosen = [k for k in KINDS if self.options.ratio(k) and self.options.splice_count(k)]
        return 2 if chosen and self.options.splice_weight == "dequant" else 1

    # What users call ----------------------------------------------------------------------------

    def refresh_now(self) -> dict[str, Any]:
        """Choose the lists anew from what was counted.

        A sync that is going on ends; if that is a refresh, or puts lists in force that waited for
        it, this is the one.

        Returns "applied" (False if it waits for the next sync), "changed" and "metrics".
        """
        before = self.version
        done = self._end_sync()
        if not done and self.gathers_columns:
            self._pending.choose(self._refresh)
            self._wait("the refresh")
        elif not done:
            self._refresh()
        return {
            "applied": done or not self.gathers_columns,
            "changed": self.version != before,
            "metrics": [m.to_json() for m in self.metrics],
        }

    def forget(self) -> None:
        """Forget statistics and averages; the lists in force stay until the next refresh.

        Energies are unknown until rows have been counted again.
        """
        self.count_staged()
        self._last_known = {}
        for state in self.states:
            reset(state.statistics)
            averages = state.averages
            for name in ("block", "block_known", "channel", "ready", "uncovered", "tokens"):
                getattr(averages, name).zero_()

    def begin_calibration(self) -> None:
        """``forget``, with a copy on the host of all that a calibration changes.

        A sync that is going on ends. A calibration that never ended is over.
        """
        self.end_sync()
        self.count_staged()
        self._backup = take_backup(
            self.states, self.metrics, self._last_known, self._pending.lists, self._pending.differ
        )
        self.forget()

    def end_calibration(self) -> None:
        """It succeeded: drop the copy."""
        self._backup = None

    def undo_calibration(self) -> bool:
        """It failed: bring statistics, averages and lists back; returns whether there was a copy.

        With BF16 columns the lists in force stay, which a calibration does not change.
        """
        backup, self._backup = self._backup, None
        if backup is None:
            return False
        self.end_sync()
        self.count_staged()
        differ = bring_back(backup, self.states, lists=not self.gathers_columns)
        self.metrics, self._last_known = backup.metrics, backup.last_known
        self._pending.lists, self._pending.differ = backup.chosen, backup.chosen_differ
        if differ:
            self._changed()
        self._info("a calibration failed: statistics and lists are those before it")
        return True

    def save(
        self,
        path: str | os.PathLike[str],
        gather: Callable[[list[SitePart]], Sequence[list[SitePart]] | None],
    ) -> dict[str, Any] | None:
        """Write the selection file of all ranks; returns its absolute path and the number of
        inputs, None elsewhere.

        Lists that wait for a sync are saved in place of those in force.

        gather: every rank's parts on the rank that writes, None on the others.
        """
        self.count_staged()
        parts = [snapshot(state) for state in self._pending.states()]
        everyone = gather(parts)
        if everyone is None:
            return None
        together = [part for parts in everyone for part in parts]
        write_selection_file(path, together, tp_size=self.tp_size, options=self.options)
        return {"path": absolute(path), "inputs": len({part.site.name for part in together})}

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Take over a selection file; "applied" is False if it waits for the next sync.

        Raises:
            ValueError: the file does not fit this engine; nothing was changed, and a sync that is
                going on goes on.
            OSError: it cannot be read; the same holds.
        """
        write = self._reader(path)
        self.end_sync()
        if self.gathers_columns:
            self._pending.choose(write)
            self._wait(absolute(path))
        else:
            write()
            self._changed()
        return {"applied": not self.gathers_columns}

    # How ----------------------------------------------------------------------------------------

    def _end_sync(self) -> bool:
        """``end_sync``; returns whether lists were chosen, or those that waited are in force."""
        if not self._arriving:
            return False
        self._arriving = False
        if not self._loaded:
            return False
        if self.gathers_columns:
            return self._commit()
        self.boundaries += 1
        due = refresh_is_due(self.boundaries, self.options)
        if due:
            self._refresh()
        return due

    def _check_splice_count(self, site: Site) -> None:
        """Warn of a count that an input has not, once for each kind."""
        count = self.options.splice_count(site.kind)
        if not self._first_rank or site.kind in self._warned or count <= site.full_width:
            return
        self._warned.add(site.kind)
        self._log.warning(
            "quads_nvfp4: splice_count_%s %d is more than the %d channels of %s: all %d are "
            "spliced there, and none is quantized",
            site.kind,
            count,
            site.full_width,
            site.name,
            site.full_width,
        )

    def _changed(self) -> None:
        self.version += 1
        if self._loaded:
            self._note_state()

    def _note_state(self) -> None:
        shared = [s for s in self.states if s.site.shards == 1 and s.site.num_groups == 1]
        digests = checksums([s.selection for s in shared])
        self._state |= {
            "version": self.version,
            "shared": dict(zip((s.site.name for s in shared), digests, strict=True)),
            "calibration_passes": self.calibration_passes,
        }

    def _info(self, message: str, *args: Any) -> None:
        if self._first_rank:
            self._log.info(f"quads_nvfp4: {message}", *args)

    def _wait(self, what: str) -> None:
        self._info(
            "BF16 columns exist only while weights load: %s takes effect with the next sync", what
        )

    def _refresh(self) -> bool:
        """Returns whether a list changed, which is noted unless lists have to wait."""
        self.count_staged()
        rows = {name: self._rows.get(name, 1) for name in self._states}
        found = refresh(self.states, self.options, in_force=not self.gathers_columns, rows=rows)
        self.metrics = [with_last_known(new, self._last_known.get(new.name)) for new in found]
        self._last_known = {metrics.name: metrics for metrics in self.metrics}
        differ = any(m.blocks_overlap < 1 or m.channels_overlap < 1 for m in self.metrics)
        if differ and not self.gathers_columns:
            self._changed()
        self._info("selections refreshed: %s", refresh_summary(self.metrics))
        if self._on_refresh is not None:
            try:
                self._on_refresh(self.metrics)
            except Exception as error:  # whoever shows metrics is no reason to stop a sync
                self._log.warning("quads_nvfp4: metrics of a refresh were not handed on: %s", error)
        return differ

    def _reader(self, path: str | os.PathLike[str]) -> Callable[[], bool]:
        """Read and check a file; what writes its content into the buffers, and returns True."""
        saved = read_selection_file(path)
        parts = fitting_parts(saved, self.states, tp_size=self.tp_size, options=self.options)

        def write() -> bool:
            self.count_staged()
            write_parts(parts, self.states)
            self._info("selections of %s", saved.path)
            return True

        return write

    def _restore_start_file(self) -> None:
        if self._start_file is not None:
            path, self._start_file = self._start_file, None
            self._reader(path)()
            self._changed()

    def _commit(self) -> bool:
        """Put the lists in force that waited; returns whether there were any that came whole."""
        if self._pending.lists is None:
            return False
        self.count_staged()
        late = self._pending.commit()
        some = len(late) < len(self._states)
        if self._pending.differ and some:
            self._changed()
        if late:
            self._log.warning(
                "quads_nvfp4: %d inputs keep their hot channels, because the sync did not bring "
                "all of their weights or some were refused: %s",
                len(late),
                ", ".join(late[:4]) + (", ..." if len(late) > 4 else ""),
            )
        return some
