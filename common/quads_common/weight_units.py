"""Loading weights unit by unit: what every engine does with the BF16 tensors it is sent.

A unit is what shares one global scale: ``w2`` of an expert, ``w1`` and ``w3`` of an expert, a fused
linear group. Its parts arrive in any order and any number of times. When all are there, the unit is
quantized into the engine's own storage, in place, and its staging buffer is freed. So no more BF16
than the open units ever exists, addresses never change, and what the engine serves is always a set
of whole units, each entirely old or entirely new.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from quads_common.fingerprint import PartialFingerprint, partial_fingerprint
from quads_common.format import INPUT_DTYPES, GlobalScaleRule, QuantizedTensor
from quads_common.quantize import quantize, weight_amax

__all__ = ["Region", "WeightUnits", "check_incoming"]


@dataclass(frozen=True)
class Region:
    """Rows of a unit's storage that are a shard of the checkpoint tensor ``name``.

    first_row, rows: in the unit. row_offset, k_offset: where they begin in the full tensor.
    """

    name: str
    first_row: int
    rows: int
    row_offset: int
    k_offset: int
    full_shape: tuple[int, int]


@dataclass
class _OpenUnit:
    """A unit of which some parts have arrived. buffer: [N, K] bf16, this rank's shard."""

    buffer: torch.Tensor
    amax: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)


def check_incoming(tensor: torch.Tensor, shape: Sequence[int], name: str) -> None:
    """Refuse a checkpoint tensor of the wrong shape or dtype, naming it.

    Raises:
        TypeError: not bf16, fp16 or fp32.
        ValueError: another shape than the full, unsharded ``shape``.
    """
    if tensor.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"{name}: weights must be one of {[str(d) for d in INPUT_DTYPES]}, got {tensor.dtype}; "
            "a checkpoint that is already quantized cannot be quantized again"
        )
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")


class WeightUnits:
    """The units of one parameter, and the storage they are quantized into.

    name: of the parameter, for messages. parts: names of the parts that make a unit complete.
    packed: [U, N, K/2] uint8, block_scale: [U, N, K/16] float8_e4m3fn, global_scale: [U] float32;
    U units of this rank. They are written with ``copy_`` only. regions: which checkpoint tensors a
    unit holds.
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
    ) -> None:
        self.name = name
        self.parts = tuple(parts)
        self.packed = packed
        self.block_scale = block_scale
        self.global_scale = global_scale
        self.regions = regions
        self.rule = rule
        self.loaded: set[int] = set()  # units that hold weights since the last `forget`
        self._open: dict[int, _OpenUnit] = {}

    @property
    def count(self) -> int:
        """Number of units."""
        return self.packed.shape[0]

    def stage(self, unit: int) -> torch.Tensor:
        """The bf16 [N, K] buffer of a unit's shard, on the storage's device; opens the unit."""
        if unit not in self._open:
            _, rows, half_k = self.packed.shape
            buffer = torch.empty(
                (rows, half_k * 2), dtype=torch.bfloat16, device=self.packed.device
            )
            self._open[unit] = _OpenUnit(buffer)
        return self._open[unit].buffer

    def arrived(self, unit: int, parts: Sequence[str], full: torch.Tensor, source: str) -> bool:
        """Note that ``parts`` of a unit have been written to its buffer; quantize when complete.

        full: the unsharded tensor, whose amax counts. source: its checkpoint name. A part that
        comes again replaces its earlier copy. Returns whether the unit was quantized.

        Raises:
            ValueError: the unit is complete and holds NaN or Inf. The unit keeps its old weights.
        """
        opened = self._open[unit]
        amax = weight_amax(full).amax().to(self.packed.device, non_blocking=True)
        for part in parts:
            if part not in self.parts:
                raise ValueError(f"{source}: {part!r} is not a part of {self.name} {self.parts}")
            opened.amax[part] = amax
            opened.sources[part] = source
        if set(opened.amax) != set(self.parts):
            return False
        del self._open[unit]
        total = torch.stack(list(opened.amax.values())).amax()
        if not bool(total.isfinite()):  # the one device read per unit
            bad = [opened.sources[p] for p, a in opened.amax.items() if not bool(a.isfinite())]
            raise ValueError(
                f"{', '.join(sorted(set(bad)))}: NaN or Inf in the weight; {self.name}"
                f"[{unit}] keeps its previous values"
            )
        q = quantize(opened.buffer, amax=total, global_scale_rule=self.rule, name=self.name)
        self._write(unit, q)
        self.loaded.add(unit)
        return True

    def drop_open(self) -> list[str]:
        """Free what is incomplete; one sentence for each unit that was."""
        dropped = []
        for unit, opened in sorted(self._open.items()):
            missing = [part for part in self.parts if part not in opened.amax]
            dropped.append(
                f"{self.name}[{unit}]: got {sorted(set(opened.sources.values()))}, "
                f"never got {missing}; previous weights kept"
            )
        self._open.clear()
        return dropped

    def missing(self) -> list[int]:
        """Units that hold no weights since the start or the last ``forget``."""
        return [unit for unit in range(self.count) if unit not in self.loaded]

    def forget(self) -> None:
        """The storage's content is lost (sleep level 2): every unit must come again."""
        self.loaded.clear()
        self._open.clear()

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
        """A unit's stored weight [N, K] (views of the storage)."""
        return QuantizedTensor(
            self.packed[unit], self.block_scale[unit], self.global_scale[unit].reshape(())
        )

    def fingerprints(self, unit: int) -> dict[str, list[PartialFingerprint]]:
        """This rank's part of the fingerprint of each checkpoint tensor in a unit, by name."""
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
        self.packed[unit].copy_(q.packed)
        self.block_scale[unit].view(torch.uint8).copy_(q.block_scale.view(torch.uint8))
        self.global_scale[unit].copy_(q.global_scale)
