"""Loading weights unit by unit: what every engine does with the BF16 tensors it is sent.

A unit is what shares one global scale: ``w2`` of an expert, ``w1`` and ``w3`` of an expert, a fused
linear group. Its parts arrive in any order and any number of times. When all are there, the unit is
quantized into the engine's own storage, in place, and its staging buffer is freed. So no more BF16
than the open units ever exists, addresses never change, and what the engine serves is always a set
of whole units, each entirely old or entirely new.

A unit with NaN or Inf keeps its old weights. On a CPU that raises when it is complete. On a GPU
nothing waits for the device: it raises when all units of the parameter have come, or at the next
boundary.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from quads_common.fingerprint import PartialFingerprint, partial_fingerprint
from quads_common.format import WEIGHT_AMAX_MAX, GlobalScaleRule, QuantizedTensor
from quads_common.quantize import quantize, weight_amax
from quads_common.weight_parts import NO_PIECE, OpenUnit, Piece, Region, check_incoming
from quads_common.weight_tiles import TileLayout

if TYPE_CHECKING:
    from quads_common.kernels.units import UnitQuantizer

__all__ = ["Piece", "Region", "Watcher", "WeightUnits", "check_incoming"]


class Watcher(Protocol):
    """Whoever needs the BF16 weight of a unit that completes."""

    def completed(self, unit: int, weight: torch.Tensor, good: torch.Tensor) -> None:
        """Before anything raises. weight: the buffer [N, K] bf16, whose other parts were staged.

        good: bool scalar on the weight's device, whether the unit was quantized from it.
        """


class WeightUnits:
    """The units of one parameter, and the storage they are quantized into.

    name: of the parameter, for messages. parts: names of the parts that make a unit complete.
    packed: [U, N, K/2] uint8, block_scale: [U, N, K/16] float8_e4m3fn, global_scale: [U] float32;
    U units of this rank. They are written in place only. regions: which checkpoint tensors a unit
    holds. layout: the order in which they are stored; None: canonical.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[str],
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        regions: Callable[[int], list[Region]],
        rule: GlobalScaleRule = "pow2",
        layout: TileLayout | None = None,
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.packed = packed
        self.block_scale = block_scale
        self.global_scale = global_scale
        self.regions = regions
        self.rule = rule
        self.layout = layout
        self.watcher: Watcher | None = None  # needs staged parts: ``stage`` and ``arrived``
        self.loaded: set[int] = set()  # units that hold weights since the last `forget`
        self.now = 0  # arrivals so far, of parts or of pieces of them
        self._open: dict[int, OpenUnit] = {}
        self._bits = {part: 1 << i for i, part in enumerate(self.parts)}
        self._all_bits = 2 ** len(self.parts) - 1
        self._on_gpu: UnitQuantizer | None = None
        # Quantized on the GPU, NaN and Inf not looked for yet: sources, and whether it was loaded.
        self._unchecked: dict[int, tuple[dict[str, str], bool]] = {}

    @property
    def count(self) -> int:
        """Number of units."""
        return self.packed.shape[0]

    def load(self, unit: int, part: str, full: torch.Tensor, source: str, piece: Piece) -> bool:
        """Take ``piece`` of a part's full tensor [rows, columns]; quantize when complete.

        The fast way: no staging of the part that completes a unit. source: its checkpoint name.
        Returns and raises as ``arrived``.
        """
        gpu = self._on_gpu or self._gpu()
        if gpu is not None:
            return self._take(gpu, unit, (part,), full, source, piece)
        columns = slice(piece.k_offset, piece.k_offset + self.packed.shape[2] * 2)
        shard = full[piece.row_offset : piece.row_offset + piece.rows, columns]
        self.stage(unit)[piece.first_row : piece.first_row + piece.rows].copy_(shard)
        return self.arrived(unit, (part,), full, source)

    def stage(self, unit: int) -> torch.Tensor:
        """The bf16 [N, K] buffer of a unit's shard, on the storage's device; opens the unit."""
        opened = self._open.get(unit)
        if opened is None:
            opened = self._open[unit] = OpenUnit()
        opened.changed = self.now = self.now + 1
        if opened.buffer is None:
            _, rows, half_k = self.packed.shape
            opened.buffer = torch.empty(
                (rows, half_k * 2), dtype=torch.bfloat16, device=self.packed.device
            )
        return opened.buffer

    def arrived(self, unit: int, parts: Sequence[str], full: torch.Tensor, source: str) -> bool:
        """Note that ``parts`` of a unit have been written to its buffer; quantize when complete.

        full: the unsharded tensor, whose amax counts. source: its checkpoint name. A part that
        comes again replaces its earlier copy. Returns whether the unit was quantized.

        Raises:
            ValueError: the unit is complete and holds NaN or Inf. The unit keeps its old weights.
        """
        gpu = self._on_gpu or self._gpu()
        if gpu is not None:
            return self._take(gpu, unit, parts, full, source, NO_PIECE)
        opened = self._open[unit]
        opened.changed = self.now = self.now + 1
        amax = weight_amax(full).amax().to(self.packed.device)
        for part in parts:
            self._bit(part, source)
            opened.amax[part] = amax
            opened.sources[part] = source
        if len(opened.sources) < len(self.parts):
            return False
        del self._open[unit]
        bad = [p for p, a in opened.amax.items() if not bool(a <= WEIGHT_AMAX_MAX)]
        if bad:
            raise ValueError(self._nonfinite(unit, opened.sources, bad))
        total = torch.stack(list(opened.amax.values())).amax()
        assert opened.buffer is not None, f"{source}: {unit=} was never staged"
        q = quantize(opened.buffer, amax=total, global_scale_rule=self.rule, name=self.name)
        self._write(unit, q)
        self.loaded.add(unit)
        if self.watcher is not None:
            good = torch.ones((), dtype=torch.bool, device=self.packed.device)
            self.watcher.completed(unit, opened.buffer, good)
        return True

    def check(self) -> None:
        """Look for NaN and Inf in what was quantized on the GPU since the last time.

        Raises:
            ValueError: names the tensors. Those units have kept their old weights.
        """
        self._raise_nonfinite([])

    def drop_open(self) -> list[str]:
        """Free what is incomplete; one sentence for each unit that was. Raises as ``check``."""
        dropped = self.drop_since(-1)
        self._raise_nonfinite(dropped)
        return dropped

    def drop_since(self, then: int) -> list[str]:
        """Free what is incomplete and has changed since ``now`` was ``then``; a sentence for each.

        For calls that fail: what they left half must not become whole with another update's half.
        """
        dropped = []
        for unit, opened in sorted(self._open.items()):
            if opened.changed > then:
                missing = [part for part in self.parts if part not in opened.sources]
                dropped.append(
                    f"{self.name}[{unit}]: got {sorted(set(opened.sources.values()))}, "
                    f"never got {missing}; previous weights kept"
                )
                del self._open[unit]
        return dropped

    def missing(self) -> list[int]:
        """Units without weights since the start or the last ``forget``. Raises as ``check``."""
        self.check()
        return [unit for unit in range(self.count) if unit not in self.loaded]

    def forget(self) -> None:
        """The storage's content is lost (sleep level 2): every unit must come again."""
        self.loaded.clear()
        self._open.clear()
        self._unchecked.clear()
        if self._on_gpu is not None:
            self._on_gpu.release()

    def fill_dummy(self, seed: int = 0) -> None:
        """Random codes under scale 1/64, for engines that start without a checkpoint."""
        generator = torch.Generator(device=self.packed.device).manual_seed(seed)
        self.packed.copy_(
            torch.randint(0, 256, self.packed.shape, generator=generator, device=self.packed.device)
        )
        self.block_scale.copy_(torch.ones_like(self.block_scale, dtype=torch.float32))
        self.global_scale.fill_(2.0**-6)
        self.loaded.update(range(self.count))

    def quantized(self, unit: int) -> QuantizedTensor:
        """A unit's stored weight [N, K] in canonical order (views of the storage if it is so)."""
        stored = QuantizedTensor(
            self.packed[unit], self.block_scale[unit], self.global_scale[unit].reshape(())
        )
        return stored if self.layout is None else self.layout.untile(stored)

    def fingerprints(self, unit: int) -> dict[str, list[PartialFingerprint]]:
        """This rank's part of the fingerprint of each checkpoint tensor in a unit, by name.

        Raises as ``check``.
        """
        self.check()
        found: dict[str, list[PartialFingerprint]] = {}
        q = self.quantized(unit)
        for region in self.regions(unit):
            rows = slice(region.first_row, region.first_row + region.rows)
            shard = QuantizedTensor(q.packed[rows], q.block_scale[rows], q.global_scale)
            part = partial_fingerprint(
                shard,
                row_offset=region.row_offset,
                k_offset=region.k_offset,
                full_shape=region.full_shape,
            )
            found.setdefault(region.name, []).append(part)
        return found

    def _write(self, unit: int, q: QuantizedTensor) -> None:
        if self.layout is not None:
            q = self.layout.tile(q)
        self.packed[unit].copy_(q.packed)
        self.block_scale[unit].view(torch.uint8).copy_(q.block_scale.view(torch.uint8))
        self.global_scale[unit].copy_(q.global_scale)

    def _gpu(self) -> "UnitQuantizer | None":
        """What quantizes on the GPU; None where the storage is on a CPU."""
        if self._on_gpu is None and self.packed.is_cuda:
            from quads_common.kernels.units import UnitQuantizer

            self._on_gpu = UnitQuantizer(
                self.packed,
                self.block_scale,
                self.global_scale,
                len(self.parts),
                self.rule,
                layout=self.layout,
            )
        return self._on_gpu

    def _take(
        self,
        gpu: "UnitQuantizer",
        unit: int,
        parts: Sequence[str],
        full: torch.Tensor,
        source: str,
        piece: Piece,
    ) -> bool:
        """``load`` (with a piece) and ``arrived`` (without) on the GPU. Runs once per tensor."""
        if unit in self._unchecked:  # what the check looks at would be overwritten
            self.check()
        mask = 0
        for part in parts:
            mask |= self._bit(part, source)
        opened = self._open.get(unit)
        if opened is None:
            opened = self._open[unit] = OpenUnit()
        opened.changed = self.now = self.now + 1
        last = opened.mask | mask == self._all_bits
        stage = self.stage(unit) if piece.rows and not last else opened.buffer
        gpu.take(unit, mask, full, piece, stage, last)
        opened.mask |= mask
        for part in parts:
            opened.sources[part] = source
        if last:
            if self.watcher is not None:
                assert opened.buffer is not None, f"{source}: {unit=} was never staged"
                self.watcher.completed(unit, opened.buffer, gpu.accepted(unit))
            del self._open[unit]
            self._unchecked[unit] = (opened.sources, unit in self.loaded)
            self.loaded.add(unit)
            if len(self._unchecked) == self.count:
                self.check()
        return last

    def _raise_nonfinite(self, dropped: list[str]) -> None:
        """``check``; units that were dropped at the same time are told with the others."""
        if self._on_gpu is None or not (self._unchecked or dropped):
            return
        unchecked, self._unchecked = self._unchecked, {}
        bad = self._on_gpu.bad_parts(list(unchecked))
        if not self._open:
            self._on_gpu.release()
        sentences = []
        for unit, indices in sorted(bad.items()):
            sources, was_loaded = unchecked[unit]
            sentences.append(self._nonfinite(unit, sources, [self.parts[i] for i in indices]))
            if not was_loaded:
                self.loaded.discard(unit)
        if sentences:
            raise ValueError("; ".join(sentences + dropped))

    def _nonfinite(self, unit: int, sources: dict[str, str], parts: list[str]) -> str:
        names = ", ".join(sorted({sources[part] for part in parts}))
        return (
            f"{names}: NaN or Inf in the weight, or a magnitude above {WEIGHT_AMAX_MAX:.4g}; "
            f"{self.name}[{unit}] keeps its previous values"
        )

    def _bit(self, part: str, source: str) -> int:
        if part not in self._bits:
            raise ValueError(f"{source}: {part!r} is not a part of {self.name} {self.parts}")
        return self._bits[part]
