"""Routed experts of the checkpoint: which part this rank holds, and the loader that takes it."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from quads_common.compensation.columns import SiteColumns
from quads_common.format import BLOCK_SIZE
from quads_common.weight_units import Piece, Region, WeightUnits, check_incoming

__all__ = ["ExpertLoader", "ExpertShards", "check_sizes"]


def check_sizes(prefix: str, hidden: int, inner: int, tp_size: int) -> None:
    """Raise ``ValueError`` unless hidden size and a rank's intermediate size are whole blocks."""
    sizes = {"hidden size": (hidden, hidden), "intermediate size": (inner * tp_size, inner)}
    for what, (full, k) in sizes.items():
        if k % BLOCK_SIZE:
            raise ValueError(
                f"{prefix}: {what} {full} over tensor parallel size {tp_size} leaves {k} per rank, "
                f"which cuts a block of {BLOCK_SIZE}"
            )


class ExpertShards:
    """Where this rank's expert weights lie in the checkpoint's: names and offsets.

    expert_map: [global experts] local id or -1, None without expert parallelism.
    """

    def __init__(self, prefix: str, expert_map, moe, hidden: int, inner: int, gated: bool) -> None:
        self.prefix = prefix
        self.hidden = hidden
        self.inner = inner
        self.gated = gated
        self.tp_rank = moe.moe_parallel_config.tp_rank
        self.full_inner = inner * moe.moe_parallel_config.tp_size
        mapping = range(moe.num_experts) if expert_map is None else expert_map.tolist()
        self.global_ids = {local: e for e, local in enumerate(mapping) if local >= 0}

    def w13(self, unit: int) -> list[Region]:
        """Rows [gate | up] of a local expert; the full tensor has all gate rows first."""
        full = (self.full_inner * (2 if self.gated else 1), self.hidden)
        name = f"{self.prefix}.{self.global_ids[unit]}.w13"
        start = self.tp_rank * self.inner
        regions = [Region(name, 0, self.inner, start, 0, full)]
        if self.gated:
            up = self.full_inner + start
            regions.append(Region(name, self.inner, self.inner, up, 0, full))
        return regions

    def w2(self, unit: int) -> list[Region]:
        """All rows of a local expert, this rank's columns."""
        name = f"{self.prefix}.{self.global_ids[unit]}.w2"
        full = (self.hidden, self.full_inner)
        return [Region(name, 0, self.hidden, 0, self.tp_rank * self.inner, full)]


class ExpertLoader:
    """Takes full expert matrices or [E, N, K] stacks; writes this rank's share to the units.

    arriving: called before each tensor that this rank takes. columns: of w13 and w2, see
    ``SiteColumns``.
    """

    def __init__(self, prefix: str, w13: WeightUnits, w2: WeightUnits, expert_map_manager, moe):
        self.prefix = prefix
        self.w13 = w13
        self.w2 = w2
        self.expert_map_manager = expert_map_manager
        hidden, inner = w2.packed.shape[1], w2.packed.shape[2] * 2
        tp_size = moe.moe_parallel_config.tp_size
        start = moe.moe_parallel_config.tp_rank * inner
        # Shard id -> full shape in the checkpoint, and what this rank takes of it.
        up = (inner * tp_size, hidden)
        self.pieces = {
            "w1": (up, Piece(inner, row_offset=start)),
            "w3": (up, Piece(inner, first_row=inner, row_offset=start)),
            "w2": ((hidden, inner * tp_size), Piece(hidden, k_offset=start)),
        }
        self.arriving: Callable[[], object] | None = None
        self.columns: tuple[SiteColumns | None, SiteColumns | None] = (None, None)
        self.calls = 0
        self.experts = moe.num_experts

    def named(
        self,
        layer: nn.Module,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]],
    ) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[str]]:
        """``RoutedExperts.load_weights`` that looks the usual names up and raises on unknown ones.

        vLLM's own compares a name with those of all experts (up to 0.31), makes the list of them on
        every call, and skips what matches none. Stacks and unusual names still go through it.
        """
        table: dict[str, tuple[str, int, str]] = {}

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
            if not table:
                table.update(expert_names(layer))
            for name, weight in weights:
                found = table.get(name) if weight.ndim == 2 else None
                if found is None:
                    yield from self._load_unusual(load_weights, name, weight)
                    continue
                param_name, expert, shard = found
                source = f"{self.prefix}.{expert}.{shard}"
                if self._load_expert(weight, source, shard, expert):
                    yield param_name

        return load

    def _load_unusual(
        self,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]],
        name: str,
        weight: torch.Tensor,
    ) -> Iterator[str]:
        if weight.ndim == 3 and weight.shape[0] != self.experts:
            raise ValueError(
                f"{self.prefix}.{name}: expected {self.experts} experts, got shape "
                f"{list(weight.shape)}"
            )
        before = self.calls
        yield from load_weights([(name, weight)])
        if self.calls == before:
            raise ValueError(
                f"{self.prefix}.{name}: no expert has such a weight (shape {list(weight.shape)})"
            )

    def load(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """``RoutedExperts.weight_loader``'s signature; ``param`` is never read or written.

        expert_id is global. Experts of other ranks return False. A 3-D tensor holds one matrix per
        global expert.
        """
        self.calls += 1
        if loaded_weight.ndim == 3:
            results = [
                self._load_expert(matrix, f"{self.prefix}.{e}.{shard_id}", shard_id, e)
                for e, matrix in enumerate(loaded_weight)
            ]
            success = any(results)
        else:
            source = f"{self.prefix}.{expert_id}.{shard_id}"
            success = self._load_expert(loaded_weight, source, shard_id, expert_id)
        return success if return_success else None

    def _load_expert(
        self, matrix: torch.Tensor, source: str, shard_id: str, expert_id: int
    ) -> bool:
        unit = self.expert_map_manager.map_global_to_local(expert_id)
        if unit == -1:
            return False
        units = self.w2 if shard_id == "w2" else self.w13
        if shard_id not in units.parts:
            raise ValueError(f"{source}: shard id {shard_id!r} is not one of w1, w2, w3")
        full, piece = self.pieces[shard_id]
        check_incoming(matrix, full, source)
        if self.arriving is not None:
            self.arriving()
        columns = self.columns[units is self.w2]
        if columns is None:
            units.load(unit, shard_id, matrix, source, piece)
        else:
            columns.load(units, unit, shard_id, matrix, source, piece)
        return True


def expert_names(layer: nn.Module) -> dict[str, tuple[str, int, str]]:
    """Parameter name, global expert id and shard id by checkpoint name, from vLLM's own mapping.

    Names are relative to the layer: ``3.gate_proj.weight``. Empty where a layer has no such mapping
    (vLLM 0.24).
    """
    if not hasattr(layer, "get_expert_mapping"):
        return {}
    last = layer.layer_name.rpartition(".")[2] + "."
    found = {}
    for param_name, weight_name, expert, shard in layer.get_expert_mapping():
        if param_name.startswith(last) and weight_name.startswith(last):
            name = weight_name.removeprefix(last) + "weight"
            found[name] = (param_name.removeprefix(last) + "weight", expert, shard)
    return found
