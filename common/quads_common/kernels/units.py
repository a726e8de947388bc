"""Units of weights on the GPU: one launch for each part that arrives, no host synchronization.

A part is read twice by its launch, for its amax and for its copy or its codes; the second time it
comes from the L2 cache. The launch that completes a unit writes the codes of all of it into the
engine's storage. The price of a launch is that of a ``copy_``: the compiled kernel is called
directly, with addresses, because Triton's own ``kernel[grid](...)`` costs several times as much.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from quads_common.format import BLOCK_SIZE, GlobalScaleRule, check_block_aligned
from quads_common.kernels._coding import WEIGHT_AMAX_MAX_BITS
from quads_common.kernels._units import take_part_kernel
from quads_common.weight_parts import Piece
from quads_common.weight_tiles import TileLayout

__all__ = ["UnitQuantizer"]

TILE = 128  # blocks that a program takes at a time
WARPS = 8
MAX_PROGRAMS = 256

# (full, stage, tables, numbers) -> None
Launcher = Callable[
    [torch.Tensor, torch.Tensor | None, "_Tables", tuple[int, int, int, int, int]], None
]


@dataclass(frozen=True)
class _Tables:
    """What a sync needs besides the units' storage.

    maxima: int32 [U, parts, programs], bits of what each program saw of each part. counters: int32
    [U]. addresses: of the storage and of these two.
    """

    maxima: torch.Tensor
    counters: torch.Tensor
    addresses: tuple[int, ...]


class UnitQuantizer:
    """Quantizes the units of one parameter; ``parts`` of them make a unit complete.

    packed: [U, N, K/2] uint8, block_scale: [U, N, K/16] float8_e4m3fn, global_scale: [U] float32,
    contiguous, on one GPU. programs: of a launch, a power of two; default: two for each
    multiprocessor. layout: the order in which units are stored; None: canonical.
    """

    def __init__(
        self,
        packed: torch.Tensor,
        block_scale: torch.Tensor,
        global_scale: torch.Tensor,
        parts: int,
        rule: GlobalScaleRule,
        programs: int | None = None,
        layout: TileLayout | None = None,
    ) -> None:
        for tensor in (packed, block_scale, global_scale):
            if not tensor.is_contiguous():
                raise ValueError(f"units need contiguous storage, got strides {tensor.stride()}")
        if programs is not None and programs & (programs - 1):
            raise ValueError(f"programs must be a power of two, got {programs}")
        self.storage = (packed, block_scale.view(torch.uint8), global_scale)
        self.parts = parts
        self.rule = rule
        self.layout = layout
        self.programs = programs or _programs(packed.device)
        self._device = packed.get_device()
        self._tables: _Tables | None = None
        self._launchers: dict[tuple, Launcher] = {}

    def take(
        self,
        unit: int,
        mask: int,
        full: torch.Tensor,
        piece: Piece,
        stage: torch.Tensor | None,
        last: bool,
    ) -> None:
        """Note the amax of ``full`` for the parts in ``mask``; copy it, or quantize the unit.

        full: [rows, columns] bf16, fp16 or fp32. piece: what of it belongs to the unit; no rows if
        the caller has copied it. stage: [N, K] bf16, takes the piece, or holds the other parts if
        this one is the ``last``; None if there are none.
        """
        if full.get_device() != self._device:
            full = full.to(self.storage[0].device)
        if full.stride(1) != 1:
            full = full.contiguous()
        tables = self._tables or self._allocate()
        aligned = full.data_ptr() % 16 == 0
        key = (full.dtype, full.shape, full.stride(0), aligned, piece.rows, last)
        launcher = self._launchers.get(key)
        if launcher is None:
            launcher = self._launchers[key] = self._compile(full, piece, last)
        block_offset = piece.k_offset // BLOCK_SIZE
        numbers = (unit, mask, piece.first_row, piece.row_offset, block_offset)
        launcher(full, stage, tables, numbers)

    def accepted(self, unit: int) -> torch.Tensor:
        """Bool scalar on the device: whether the unit that was completed last was written."""
        assert self._tables is not None, f"{unit=} was not completed"
        return self._tables.maxima[unit].amax() <= WEIGHT_AMAX_MAX_BITS

    def bad_parts(self, units: Sequence[int]) -> dict[int, list[int]]:
        """Those of the completed units that were not written: which parts hold NaN or Inf.

        Reads the device, so it waits for all launches.
        """
        if self._tables is None or not units:
            return {}
        bits = self._tables.maxima.amax(-1).tolist()
        found = {u: [p for p, b in enumerate(bits[u]) if b > WEIGHT_AMAX_MAX_BITS] for u in units}
        return {unit: parts for unit, parts in found.items() if parts}

    def release(self) -> None:
        """Free the tables: no unit is open and all completed ones were looked at."""
        self._tables = None

    def _allocate(self) -> _Tables:
        packed = self.storage[0]
        shape = (packed.shape[0], self.parts, self.programs)
        maxima = packed.new_empty(shape, dtype=torch.int32)
        counters = packed.new_zeros(packed.shape[0], dtype=torch.int32)
        addresses = tuple(t.data_ptr() for t in (*self.storage, maxima, counters))
        self._tables = _Tables(maxima, counters, addresses)
        return self._tables

    def _compile(self, full: torch.Tensor, piece: Piece, last: bool) -> Launcher:
        """What launches the kernel for tensors of this type, shape and alignment."""
        check_block_aligned(full.shape[1], f"weight {list(full.shape)}")
        packed = self.storage[0]
        width = packed.shape[2] * 2
        rows_fit = piece.row_offset + piece.rows <= full.shape[0]
        if piece.rows and not (rows_fit and piece.k_offset + width <= full.shape[1]):
            raise ValueError(f"{piece} with {width} columns is not in {list(full.shape)}")
        constants = {
            "FULL_ROWS": full.shape[0],
            "FULL_WIDTH": full.shape[1],
            "STRIDE": full.stride(0),
            "PART_ROWS": piece.rows,
            "ROWS": packed.shape[1],
            "WIDTH": width,
            "PARTS": self.parts,
            "LAST": last,
            "TE_RULE": self.rule == "te",
            "TILE": TILE,
            "PROGRAMS": self.programs,
            "TILED": "no" if self.layout is None else self.layout.order,
        }
        kernel, grid = take_part_kernel, (self.programs, 1, 1)
        no_stage = packed.new_empty(16, dtype=torch.bfloat16)
        if not isinstance(kernel, triton.JITFunction):  # the interpreter

            def interpret(full, stage, tables, numbers):  # type: ignore[no-untyped-def]
                stage = no_stage if stage is None else stage
                tensors = (full, stage, *self.storage, tables.maxima, tables.counters)
                kernel[grid](*tensors, *numbers, **constants, enable_fp_fusion=False)

            return interpret
        tables = self._tables
        assert tables is not None
        compiled = kernel.warmup(
            full, no_stage, *self.storage, tables.maxima, tables.counters, 0, 0, 0, 0, 0,
            **constants, grid=grid, num_warps=WARPS, enable_fp_fusion=False,
            launch_cooperative_grid=last,
        )  # fmt: skip
        run, values = compiled[grid], tuple(constants.values())
        stream_of, device = triton.runtime.driver.active.get_current_stream, self._device

        def launch(full, stage, tables, numbers):  # type: ignore[no-untyped-def]
            address = 0 if stage is None else stage.data_ptr()
            run(
                full.data_ptr(), address, *tables.addresses, *numbers, *values,
                stream=stream_of(device),
            )  # fmt: skip

        return launch


def _programs(device: torch.device) -> int:
    """Two for each multiprocessor, rounded down to a power of two."""
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_PROGRAMS, 2 ** count.bit_length())
