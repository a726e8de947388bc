"""What an engine's layers share and hold when they are compensated, and which rows are sampled.

The host knows which rows of a forward are tokens, hence also which of them are sampled
(``sampling``): ``Runtime`` writes their places into one map for all layers right before the model
runs and clears it right after. Warm-up, profiling, graph capture, dummy batches and padding are
never in it. The layers keep those rows (``staging``), and they are counted when the next forward's
would find no place, and before anything reads or replaces statistics or lists.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from quads_common.compensation.controller import Compensator
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.sampling import most_samples, sampled_rows
from quads_common.compensation.site import Site
from quads_common.compensation.staging import StagedInput, count_staged, new_staging
from quads_common.compensation.state import SiteState
from quads_common.weight_tiles import TileLayout

__all__ = ["MOST_PLACES", "LayerInput", "Runtime"]

# Rows of one forward that are kept at most.
MOST_PLACES = 256


@dataclass
class Runtime:
    """What the layers of one model on one rank share.

    period: one of so many tokens is counted; 0 where it is not known which rows are tokens.
    max_tokens: of a forward. offered: tokens so far, the same on all tensor-parallel ranks.
    """

    compensator: Compensator
    options: CompensationOptions
    period: int
    max_tokens: int
    offered: int = 0
    _sample_map: torch.Tensor | None = field(default=None, repr=False)
    _inputs: dict[str, StagedInput] = field(default_factory=dict, repr=False)
    _used: int = 0  # places
    _uncounted: int = 0  # of the tokens offered
    _marked: int = 0  # rows of the map

    def __post_init__(self) -> None:
        self.compensator.count_staged = self.count_staged

    @property
    def places(self) -> int:
        """Tokens whose rows can wait at the same time."""
        return min(MOST_PLACES, most_samples(self.max_tokens, self.period)) if self.period else 0

    def sample_map(self, device: torch.device) -> torch.Tensor:
        """[max tokens] int32 on the model's device, made on first use; see ``Staging``."""
        if self._sample_map is None:
            self._sample_map = torch.full((self.max_tokens,), -1, dtype=torch.int32, device=device)
        return self._sample_map

    def add_input(self, name: str, staged: StagedInput) -> None:
        """An input that is counted; a name that comes again replaces the earlier one."""
        self._inputs[name] = staged

    def begin(self, tokens: int) -> bool:
        """Before a forward of so many tokens, then padding; returns whether ``end`` must follow."""
        if self.period == 0 or self._sample_map is None:
            return False
        rows = sampled_rows(self.offered, tokens, self.period, self.places)
        if self._used + len(rows) > self.places:
            self.count_staged()
        self.offered += tokens
        self._uncounted += tokens
        if not rows:
            return False
        self._marked = rows[-1] + 1
        # New memory each time: the copy may run long after this returns.
        marks = torch.empty(self._marked, dtype=torch.int32, pin_memory=self._sample_map.is_cuda)
        values = marks.numpy()  # far faster to write to than a small tensor
        values.fill(-1)
        values[rows] = range(self._used, self._used + len(rows))
        self._used += len(rows)
        self._sample_map[: self._marked].copy_(marks, non_blocking=True)
        return True

    def end(self) -> None:
        """After it: whatever runs next has no sampled rows."""
        assert self._sample_map is not None, f"{self.max_tokens=}"
        self._sample_map[: self._marked].fill_(-1)

    def count_staged(self) -> None:
        """Count the rows that wait, with the lists in force; no synchronization with the host."""
        if self._uncounted:
            self._count()

    def prepare(self) -> None:
        """Once all layers are there: compile what counting needs, not while requests run."""
        if self._inputs:
            self._count()

    def _count(self) -> None:
        inputs = list(self._inputs.values())
        if inputs[0].rows.is_cuda:
            from quads_common.kernels.statistics import count_staged_triton

            count_staged_triton(inputs, self._uncounted)
        else:
            count_staged(inputs, self._uncounted)
        self._used = self._uncounted = 0


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
        dtype: torch.dtype,
        device: torch.device,
        top_k: int = 1,
        counted: bool = True,
        layout: TileLayout | None = None,
    ) -> None:
        """units, rows: of the weight, U matrices of N rows. dtype: of the input. top_k: rows of the
        input for each token. counted: its rows are tokens. layout: the weight's memory order."""
        options = runtime.options
        self.state: SiteState = runtime.compensator.add(site, device)
        self.columns = runtime.compensator.add_columns(self.state, units, rows, layout)
        self.alpha = float(options.rac_alpha)
        prefix = f"quads_{site.kind}_"
        for name, tensor in self.state.buffers().items():
            layer.register_buffer(prefix + name, tensor, persistent=False)
        if self.columns is not None:
            layer.register_buffer(f"{prefix}columns", self.columns.columns, persistent=False)
        has_slots = self.state.selection.channels.shape[1] > 0
        self._selection = (
            f"{prefix}selection_block_mask" if options.ratio(site.kind) else "",
            f"{prefix}selection_channels" if has_slots else "",
            f"{prefix}selection_hot_bits" if has_slots else "",
            f"{prefix}columns" if self.columns is not None else "",
        )
        counted = counted and runtime.period > 0 and options.active(site.kind)
        # Compilers want a list of mutated buffers to have elements, so there are always two.
        places = runtime.places if counted else 0
        staged = new_staging(places, top_k, site.width, dtype, device)
        self._staged = [f"{prefix}staged_rows", f"{prefix}staged_groups"]
        for name, tensor in zip(self._staged, staged, strict=True):
            layer.register_buffer(name, tensor, persistent=False)
        self._sample_map = ""
        if counted:
            self._sample_map = "quads_sample_map"  # one for all inputs of all layers
            layer.register_buffer(self._sample_map, runtime.sample_map(device), persistent=False)
            served = self.state.selection.compensation(options, site.kind)
            runtime.add_input(site.name, StagedInput(self.state.statistics, served, *staged))

    def selection(self, layer: nn.Module) -> list[torch.Tensor | None]:
        """Block mask, hot channels, their bits and BF16 columns [U, N, C]: arguments of the
        operators, next to each other there. A linear's operator takes the columns of its unit."""
        return [getattr(layer, name) if name else None for name in self._selection]

    def staged(self, layer: nn.Module) -> list[torch.Tensor]:
        """The buffers in which the operators keep sampled rows; without rows where none counts."""
        return [getattr(layer, name) for name in self._staged]

    def sample_map(self, layer: nn.Module, tokens: int) -> torch.Tensor | None:
        """[tokens] int32 of a forward; None where nothing is counted."""
        return getattr(layer, self._sample_map)[:tokens] if self._sample_map else None
