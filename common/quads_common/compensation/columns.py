"""BF16 columns of hot channels (``splice_weight="bf16"``), gathered while weights load.

The BF16 weight exists only then, and only one unit at a time. So the lists of a site change in two
steps. When a sync begins, the lists it shall end with are announced; each unit that completes
gathers its columns for the lists in force and for the announced ones. When the sync ends, the site
changes lists and columns together, if every unit was quantized; otherwise it stays as it is. So
columns, codes and lists belong together at every moment. A unit that the quantizer refuses (NaN,
Inf, too large, be it in another rank's shard) keeps its codes and its columns.
"""

import torch

from quads_common.compensation.operands import gather_columns
from quads_common.compensation.state import SiteState
from quads_common.compensation.statistics import copy_into
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import Piece, WeightUnits

__all__ = ["SiteColumns"]


class SiteColumns:
    """The columns [U, N, C] bf16 of a site's U units (experts, or 1), changed in place only.

    layout: their memory order, that of the units; None: canonical.
    """

    def __init__(
        self,
        state: SiteState,
        units: int,
        rows: int,
        device: torch.device,
        layout: TileLayout | None = None,
    ) -> None:
        slots = state.selection.channels.shape[1]
        self.state = state
        self.layout = layout
        self.columns = torch.zeros((units, rows, slots), dtype=torch.bfloat16, device=device)
        self._next: dict[str, torch.Tensor] | None = None  # the announced selection's buffers
        self._next_columns: torch.Tensor | None = None
        self._came: torch.Tensor | None = None  # [U] bool, quantized since the announcement

    def load(
        self,
        units: WeightUnits,
        unit: int,
        part: str,
        full: torch.Tensor,
        source: str,
        piece: Piece,
    ) -> bool:
        """``WeightUnits.load`` that gathers the columns of a unit that completes."""
        buffer = units.stage(unit)
        columns = slice(piece.k_offset, piece.k_offset + buffer.shape[1])
        shard = full[piece.row_offset : piece.row_offset + piece.rows, columns]
        buffer[piece.first_row : piece.first_row + piece.rows].copy_(shard)
        return self.arrived(units, unit, (part,), full, source)

    def arrived(
        self,
        units: WeightUnits,
        unit: int,
        parts: tuple[str, ...] | list[str],
        full: torch.Tensor,
        source: str,
    ) -> bool:
        """``WeightUnits.arrived``, likewise."""
        units.watcher = self
        return units.arrived(unit, parts, full, source)

    def announce(self, selection: dict[str, torch.Tensor]) -> None:
        """The buffers of the selection that the sync which begins shall end with."""
        self._next = selection
        self._next_columns = torch.zeros_like(self.columns)
        units = self.columns.shape[0]
        self._came = torch.zeros(units, dtype=torch.bool, device=self.columns.device)

    def commit(self) -> bool:
        """End of the sync: change to what was announced; returns False if units are missing."""
        selection, columns, came = self._next, self._next_columns, self._came
        self._next, self._next_columns, self._came = None, None, None
        if selection is None or columns is None or came is None:
            return True
        if not bool(came.all()):
            return False
        copy_into(self.state.selection.buffers(), selection, self.state.site.name)
        self.columns.copy_(columns)
        return True

    def completed(self, unit: int, weight: torch.Tensor, good: torch.Tensor) -> None:
        """What ``WeightUnits`` tells its watcher: gather, unless the unit keeps its codes."""
        self._write(self.columns, unit, weight, self.state.selection.channels, good)
        if self._next is not None and self._next_columns is not None and self._came is not None:
            self._write(self._next_columns, unit, weight, self._next["channels"], good)
            self._came[unit].logical_or_(good)

    def _write(
        self,
        columns: torch.Tensor,
        unit: int,
        weight: torch.Tensor,
        channels: torch.Tensor,
        good: torch.Tensor,
    ) -> None:
        hot = channels[unit if channels.shape[0] == columns.shape[0] else 0]
        found, stored = gather_columns(weight, hot), columns[unit]
        views = [(slice(None), stored)]
        if self.layout is not None:
            views = list(self.layout.columns_in_order(stored))
        for some, view in views:
            view.copy_(torch.where(good, found[:, some].reshape(view.shape), view))
