"""Shards of checkpoint tensors: which rows and columns a tensor- or expert-parallel rank holds.

Engines tell sizes and ranks; what belongs where, and how full tensors are taken, is the same for
all of them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quads_common.compensation.columns import SiteColumns
from quads_common.format import BLOCK_SIZE
from quads_common.weight_parts import Piece, Region, check_incoming
from quads_common.weight_units import WeightUnits

__all__ = ["ExpertLoader", "ExpertShards", "LinearLoader", "LinearPart", "linear_regions"]


@dataclass(frozen=True)
class LinearPart:
    """What a rank holds of one part (q, k, v, gate, up, or the whole) of a linear group.

    rows: of this rank. full_rows: of the checkpoint tensor. rank: which shard of rows this is.
    """

    rows: int
    full_rows: int
    rank: int

    @property
    def row_offset(self) -> int:
        """Where this rank's rows begin in the checkpoint tensor."""
        return self.rank * self.rows if self.rows < self.full_rows else 0


def linear_regions(
    names: Sequence[str], parts: Mapping[str, LinearPart], k: int, full_k: int, k_rank: int
) -> list[Region]:
    """This rank's rows and columns of each checkpoint tensor of a linear group.

    names: of the checkpoint's modules, one for each part; otherwise the checkpoint fuses them and
    the only name stands for all. k: columns of this rank.
    """
    k_offset = k_rank * k if k < full_k else 0
    regions, first_row = [], 0
    if len(names) != len(parts):
        name, offset = names[0], 0
        for part in parts.values():
            shape = (sum(p.full_rows for p in parts.values()), full_k)
            regions.append(
                Region(name, first_row, part.rows, offset + part.row_offset, k_offset, shape)
            )
            first_row += part.rows
            offset += part.full_rows
        return regions
    for name, part in zip(names, parts.values(), strict=True):
        shape = (part.full_rows, full_k)
        regions.append(Region(name, first_row, part.rows, part.row_offset, k_offset, shape))
        first_row += part.rows
    return regions


class LinearLoader:
    """Takes full checkpoint tensors of a linear group, one part or several stacked parts a call.

    parts: by the shard id of the engine's loaders, as text. Safe to call from several threads.
    arriving: called before each tensor. columns: see ``SiteColumns``.
    """

    def __init__(
        self, units: WeightUnits, parts: Mapping[str, LinearPart], full_k: int, k_rank: int
    ) -> None:
        self.units = units
        self.parts = dict(parts)
        self.full_k = full_k
        k = units.packed.shape[2] * 2
        k_offset = k_rank * k if k < full_k else 0
        self.pieces, first_row = {}, 0
        for name, part in parts.items():
            self.pieces[name] = Piece(part.rows, first_row, part.row_offset, k_offset)
            first_row += part.rows
        self.arriving: Callable[[], object] | None = None
        self.columns: SiteColumns | None = None
        self.calls = 0
        self._lock = threading.Lock()

    def load(self, loaded_weight: torch.Tensor, shard_id: object = None) -> None:
        """loaded_weight: the full tensor of the part(s) that ``shard_id`` names; None: of all."""
        ids = shard_id if isinstance(shard_id, tuple) else (shard_id,)
        chosen = list(self.parts) if shard_id is None else [str(i) for i in ids]
        source = self.units.name
        if chosen != list(self.parts):
            source += f" ({', '.join(chosen)})"
        for name in chosen:
            if name not in self.parts:
                raise ValueError(f"{source}: shard id {name!r} is not one of {list(self.parts)}")
        rows = sum(self.parts[name].full_rows for name in chosen)
        check_incoming(loaded_weight, (rows, self.full_k), source)
        with self._lock:
            self.calls += 1
            if self.arriving is not None:
                self.arriving()
            start = 0
            for name in chosen:
                end = start + self.parts[name].full_rows
                piece = self.pieces[name]
                full = loaded_weight[start:end]
                if self.columns is None:
                    self.units.load(0, name, full, source, piece)
                else:
                    self.columns.load(self.units, 0, name, full, source, piece)
                start = end


@dataclass(frozen=True)
class ExpertShards:
    """Where a rank's expert weights lie in the checkpoint's.

    prefix: name of the experts' module. experts: number of global ones. global_ids: of this
    rank's experts, by local index. hidden: H. inner: this rank's share of I. gated: w13 has gate
    and up rows.

    Raises:
        ValueError: H or a rank's share of I cuts a block of 16.
    """

    prefix: str
    experts: int
    global_ids: tuple[int, ...]
    hidden: int
    inner: int
    gated: bool
    tp_rank: int
    tp_size: int

    def __post_init__(self) -> None:
        sizes = {"hidden size": (self.hidden, self.hidden)}
        sizes["intermediate size"] = (self.full_inner, self.inner)
        for what, (full, k) in sizes.items():
            if k % BLOCK_SIZE:
                raise ValueError(
                    f"{self.prefix}: {what} {full} over tensor parallel size {self.tp_size} leaves "
                    f"{k} per rank, which cuts a block of {BLOCK_SIZE}"
                )

    @property
    def full_inner(self) -> int:
        """I of the checkpoint."""
        return self.inner * self.tp_size

    @property
    def w13_rows(self) -> int:
        """Rows of this rank's w13: [gate | up], or up alone."""
        return self.inner * (2 if self.gated else 1)

    @property
    def w13_parts(self) -> tuple[str, ...]:
        """Parts that complete a w13 unit."""
        return ("w1", "w3") if self.gated else ("w1",)

    def w13_regions(self, unit: int) -> list[Region]:
        """Rows [gate | up] of a local expert; the full tensor has all gate rows first."""
        full = (self.full_inner * (2 if self.gated else 1), self.hidden)
        name = f"{self.prefix}.{self.global_ids[unit]}.w13"
        start = self.tp_rank * self.inner
        regions = [Region(name, 0, self.inner, start, 0, full)]
        if self.gated:
            up = self.full_inner + start
            regions.append(Region(name, self.inner, self.inner, up, 0, full))
        return regions

    def w2_regions(self, unit: int) -> list[Region]:
        """All rows of a local expert, this rank's columns."""
        name = f"{self.prefix}.{self.global_ids[unit]}.w2"
        full = (self.hidden, self.full_inner)
        return [Region(name, 0, self.hidden, 0, self.tp_rank * self.inner, full)]


class ExpertLoader:
    """Takes full expert matrices or [E, N, K] stacks; writes this rank's share to the units.

    Safe to call from several threads. arriving: called before each tensor that this rank takes.
    columns: of w13 and w2, see ``SiteColumns``.
    """

    def __init__(self, shards: ExpertShards, w13: WeightUnits, w2: WeightUnits) -> None:
        self.shards = shards
        self.w13 = w13
        self.w2 = w2
        self.local_ids = {e: local for local, e in enumerate(shards.global_ids)}
        start, inner, hidden = shards.tp_rank * shards.inner, shards.inner, shards.hidden
        # Shard id -> full shape in the checkpoint, and what this rank takes of it.
        up = (shards.full_inner, hidden)
        self.pieces = {
            "w1": (up, Piece(inner, row_offset=start)),
            "w3": (up, Piece(inner, first_row=inner, row_offset=start)),
            "w2": ((hidden, shards.full_inner), Piece(hidden, k_offset=start)),
        }
        self.arriving: Callable[[], object] | None = None
        self.columns: tuple[SiteColumns | None, SiteColumns | None] = (None, None)
        self.calls = 0
        self._lock = threading.Lock()

    def load(self, matrix: torch.Tensor, shard_id: str, expert_id: int) -> bool:
        """One expert's w1, w2 or w3, unsharded; expert_id is global. False: another rank's."""
        source = f"{self.shards.prefix}.{expert_id}.{shard_id}"
        if shard_id not in self.pieces or (shard_id == "w3" and not self.shards.gated):
            raise ValueError(f"{source}: shard id {shard_id!r} is not one of w1, w2, w3")
        with self._lock:
            self.calls += 1
            unit = self.local_ids.get(expert_id)
            if unit is None:
                return False
            full, piece = self.pieces[shard_id]
            check_incoming(matrix, full, source)
            if self.arriving is not None:
                self.arriving()
            units = self.w2 if shard_id == "w2" else self.w13
            columns = self.columns[units is self.w2]
            if columns is None:
                units.load(unit, shard_id, matrix, source, piece)
            else:
                columns.load(units, unit, shard_id, matrix, source, piece)
        return True

    def load_stack(self, stack: torch.Tensor, shard_id: str, source: str) -> None:
        """All experts at once: "w1", "w2", "w3" or "w13" [E, 2I, H] with all gate rows first.

        Raises:
            ValueError: another number of experts or another shape than the model's.
        """
        shards = self.shards
        rows, columns = self.pieces["w2" if shard_id == "w2" else "w1"][0]
        halves = [shard_id]
        if shard_id == "w13":
            halves = list(shards.w13_parts)
            rows *= len(halves)
        expected = (shards.experts, rows, columns)
        if stack.ndim == 3 and stack.shape[0] != shards.experts:
            raise ValueError(
                f"{source}: expected {shards.experts} experts, got shape {list(stack.shape)}"
            )
        check_incoming(stack, expected, source)
        for expert, matrix in enumerate(stack):
            for half, part in zip(matrix.chunk(len(halves)), halves, strict=True):
                self.load(half, part, expert)
