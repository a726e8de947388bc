"""What an engine's layers share and hold when they are compensated, and which rows are real.

The statistics of a layer are counted inside its operator, CUDA graphs included, so which rows are
real must be known on the device. ``RealRows`` is one mask for all layers, set from the scheduler's
own count of tokens right before the model runs and cleared right after: warm-up, profiling, graph
capture and dummy batches never count a row, padding never does.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from quads_common.compensation.controller import Compensator
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.refresh import SiteState
from quads_common.compensation.site import Site

__all__ = ["LayerInput", "RealRows", "Runtime"]


class RealRows:
    """mask: [max tokens] bool on the model's device, True for the rows of this forward's tokens."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.mask = torch.zeros(size, dtype=torch.bool, device=device)

    def set(self, count: int) -> None:
        """The forward that follows has ``count`` tokens, then padding."""
        self.mask[:count].fill_(True)

    def clear(self) -> None:
        """Whatever runs next has no real rows."""
        self.mask.zero_()


@dataclass
class Runtime:
    """What the layers of one model on one rank share.

    period: one of so many rows is counted; 0 where the real rows are not known.
    """

    compensator: Compensator
    options: CompensationOptions
    period: int
    max_tokens: int
    counting: bool = False
    _rows: RealRows | None = field(default=None, repr=False)

    def rows(self, device: torch.device) -> RealRows:
        """The mask, made on first use."""
        if self._rows is None:
            self._rows = RealRows(self.max_tokens, device)
        return self._rows

    def begin(self, tokens: int) -> bool:
        """Before a forward of real tokens; returns whether ``end`` must follow."""
        if self.period == 0 or self._rows is None:
            return False
        if not self.counting:
            self.compensator.start_counting()
            self.counting = True
        self._rows.set(tokens)
        return True

    def end(self) -> None:
        """After it."""
        assert self._rows is not None, f"{self.max_tokens=}"
        self._rows.clear()


class LayerInput:
    """One compensated input of a layer: the names of its buffers there, and its columns.

    The layer owns the tensors, so that sleep level 2 and compiled graphs find them.
    """

    def __init__(
        self,
        layer: nn.Module,
        site: Site,
        runtime: Runtime,
        *,
        units: int,
        rows: int,
        device: torch.device,
        counted: bool = True,
    ) -> None:
        """units, rows: of the weight, U matrices of N rows. counted: its rows are tokens."""
        options = runtime.options
        self.state: SiteState = runtime.compensator.add(site, device)
        self.columns = runtime.compensator.add_columns(self.state, units, rows)
        self.alpha = float(options.rac_alpha)
        self.period = runtime.period if counted else 0
        prefix = f"quads_{site.kind}_"
        for name, tensor in self.state.buffers().items():
            layer.register_buffer(prefix + name, tensor, persistent=False)
        if self.columns is not None:
            layer.register_buffer(f"{prefix}columns", self.columns.columns, persistent=False)
        self._real_rows = "quads_real_rows"  # one mask for all inputs of all layers
        layer.register_buffer(self._real_rows, runtime.rows(device).mask, persistent=False)
        self._statistics = [f"{prefix}statistics_{n}" for n in self.state.statistics.buffers()]
        self._block_mask = f"{prefix}selection_block_mask" if options.ratio(site.kind) else ""
        has_slots = self.state.selection.channels.shape[1] > 0
        self._channels = f"{prefix}selection_channels" if has_slots else ""
        self._columns = f"{prefix}columns" if self.columns is not None else ""

    def selection(
        self, layer: nn.Module
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Block mask, hot channels and BF16 columns, as the operators take them."""
        names = (self._block_mask, self._channels, self._columns)
        mask, channels, columns = (getattr(layer, n) if n else None for n in names)
        return mask, channels, columns

    def statistics(self, layer: nn.Module) -> list[torch.Tensor]:
        """The buffers that the operators count in."""
        return [getattr(layer, name) for name in self._statistics]

    def real_rows(self, layer: nn.Module, tokens: int) -> torch.Tensor | None:
        """[tokens] bool mask of a forward; None where nothing is counted."""
        return getattr(layer, self._real_rows)[:tokens] if self.period else None
