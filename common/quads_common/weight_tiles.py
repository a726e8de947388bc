"""The memory order of expert weights that the ``hopper`` kernels read; exact, undone on request.

Canonical order, that of checkpoints, is the contract: fingerprints, export and comparisons use it.
A tiled weight has the same tensors, shapes and bytes in another order:

- A *tile* is 32 rows of 128 of K: 32 x 64 bytes of codes, 32 x 8 scale bytes, both contiguous.
  Tiles follow each other along K, then along the rows.
- Its 32 rows are, of gate and up (``gate_up``), 16 rows of gate and the same 16 of up; of another
  weight 32 consecutive rows with row r at place (r % 4) * 8 + r // 4.
- The 16 codes of a block, four 16-bit units of four codes, are stored as units 0, 2, 1, 3, each
  with the signs of codes 0, 2, 3, 1 in bits 15 to 12 and the magnitudes of codes 0 to 3 in bits 11
  to 0: what becomes a 16-bit float by shifts and masks, two codes at a time.

BF16 columns of such a weight, [N, C] (``operands.gather_columns``), are stored with their rows in
the order of places as [N / 8, C / 16, 8, 16]: of 8 rows 16 columns are contiguous. If C is no
multiple of 16, the last columns of 8 rows are a narrower [8, C % 16].
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from quads_common.format import QuantizedTensor

__all__ = ["COLUMNS_TOGETHER", "TILE_K", "TILE_ROWS", "TileLayout"]

TILE_ROWS = 32
TILE_K = 128
COLUMNS_TOGETHER = 16  # BF16 columns that 8 rows have beside each other
_TILE_BYTES = TILE_K // 2
_TILE_BLOCKS = TILE_K // 16
_UNIT_ORDER = [0, 2, 1, 3]
# Where a code's sign and magnitude are in its 16-bit unit.
_SIGN_BITS = (15, 12, 14, 13)
_MAGNITUDE_BITS = (9, 6, 3, 0)


@dataclass(frozen=True)
class TileLayout:
    """gate_up: rows are [gate | up], half of the rows each (w13 of a gated layer)."""

    gate_up: bool

    @property
    def order(self) -> str:
        """What the kernels call it."""
        return "gate_up" if self.gate_up else "rows"

    def fits(self, rows: int, k: int) -> bool:
        """Whether a weight [rows, k] consists of whole tiles."""
        return rows % TILE_ROWS == 0 and k % TILE_K == 0 and rows > 0 and k > 0

    def tile(self, q: QuantizedTensor) -> QuantizedTensor:
        """Canonical [..., N, K] to tiled, in new tensors.

        Raises:
            ValueError: the weight does not consist of whole tiles.
        """
        self._check(q.shape)
        units = q.packed.contiguous().view(torch.int16)
        packed = _to_fields(units).view(torch.uint8).reshape(q.packed.shape)
        scale = q.block_scale.view(torch.uint8)
        return QuantizedTensor(
            self._reorder(packed, _TILE_BYTES, inverse=False),
            self._reorder(scale, _TILE_BLOCKS, inverse=False).view(torch.float8_e4m3fn),
            q.global_scale,
        )

    def untile(self, q: QuantizedTensor) -> QuantizedTensor:
        """Tiled [..., N, K] to canonical, in new tensors."""
        self._check(q.shape)
        packed = self._reorder(q.packed, _TILE_BYTES, inverse=True)
        scale = self._reorder(q.block_scale.view(torch.uint8), _TILE_BLOCKS, inverse=True)
        units = _from_fields(packed.view(torch.int16))
        return QuantizedTensor(
            units.view(torch.uint8).reshape(packed.shape),
            scale.view(torch.float8_e4m3fn),
            q.global_scale,
        )

    def tile_columns(self, columns: torch.Tensor) -> torch.Tensor:
        """Canonical BF16 columns [..., N, C] to tiled, in a new tensor of the same shape.

        Raises:
            ValueError: N is no multiple of 32.
        """
        tiled = torch.empty_like(columns, memory_format=torch.contiguous_format)
        for some, view in self.columns_in_order(tiled):
            view.copy_(columns[..., some].reshape(view.shape))
        return tiled

    def untile_columns(self, tiled: torch.Tensor) -> torch.Tensor:
        """Undo ``tile_columns``, in a new tensor. Raises as it does."""
        columns = torch.empty_like(tiled)
        for some, view in self.columns_in_order(tiled):
            columns[..., some] = view.reshape(columns[..., some].shape)
        return columns

    def columns_in_order(self, tiled: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Views of tiled columns [..., N, C], contiguous, for reading and writing.

        Each is of some columns and has, as a tensor of more dimensions, their elements in canonical
        order: ``view.reshape(..., N, columns)``. One, or a second one of the last C % 16 columns.

        Raises:
            ValueError: N is no multiple of 32.
        """
        *lead, rows, count = tiled.shape
        if rows % TILE_ROWS:
            raise ValueError(
                f"tiled columns need rows in multiples of {TILE_ROWS}, got {list(tiled.shape)}"
            )
        eights = tiled.view(*lead, rows // TILE_ROWS, 4, 8 * count)
        whole = count // COLUMNS_TOGETHER * COLUMNS_TOGETHER
        for some in (slice(0, whole), slice(whole, count)):
            width = min(some.stop - some.start, COLUMNS_TOGETHER)
            if width == 0:
                continue
            piece = eights[..., 8 * some.start : 8 * some.stop].unflatten(-1, (-1, 8, width))
            if self.gate_up:  # tile, gate or up, which 8, columns, row, column
                piece, order = piece.unflatten(-4, (2, 2)), [1, 0, 2, 4, 3, 5]
            else:  # tile, r % 4, columns, r // 4, column
                order = [0, 3, 1, 2, 4]
            first = len(lead)
            yield some, piece.permute(*range(first), *(first + i for i in order))

    def _check(self, shape: Sequence[int]) -> None:
        if not self.fits(*shape[-2:]):
            raise ValueError(
                f"a tiled weight needs rows in multiples of {TILE_ROWS} and K in multiples of "
                f"{TILE_K}, got {list(shape)}"
            )

    def _reorder(self, bytes_: torch.Tensor, width: int, inverse: bool) -> torch.Tensor:
        """[..., N, columns] with ``width`` columns in a tile, to or from the order of tiles."""
        *lead, rows, columns = bytes_.shape
        tiles = columns // width
        high, low = (2, 16) if self.gate_up else (8, 4)
        if self.gate_up:  # rows: gate or up, tile, row; in a tile: gate or up, row
            split, order = (2, rows // TILE_ROWS, low, tiles, width), (1, 3, 0, 2, 4)
        else:  # rows: tile, r // 4, r % 4; in a tile: r % 4, r // 4
            split, order = (rows // TILE_ROWS, high, low, tiles, width), (0, 3, 2, 1, 4)
        first = len(lead)
        dims = [*range(first), *(first + i for i in order)]
        if inverse:
            tiled = [*lead, *(split[i] for i in order)]
            back = sorted(range(len(dims)), key=dims.__getitem__)
            return bytes_.reshape(tiled).permute(back).reshape(bytes_.shape).contiguous()
        return bytes_.reshape(*lead, *split).permute(dims).reshape(bytes_.shape).contiguous()


def _to_fields(units: torch.Tensor) -> torch.Tensor:
    """int16 [..., K/4] units of four nibbles to fields, blocks reordered."""
    values = units.int()
    fields = torch.zeros_like(values)
    for i, (sign, magnitude) in enumerate(zip(_SIGN_BITS, _MAGNITUDE_BITS, strict=True)):
        code = values >> 4 * i
        fields |= ((code >> 3 & 1) << sign) | ((code & 7) << magnitude)
    return fields.unflatten(-1, (-1, 4))[..., _UNIT_ORDER].flatten(-2).to(torch.int16)


def _from_fields(fields: torch.Tensor) -> torch.Tensor:
    """Undo ``_to_fields``; the order of units is its own inverse."""
    values = fields.int().unflatten(-1, (-1, 4))[..., _UNIT_ORDER].flatten(-2)
    units = torch.zeros_like(values)
    for i, (sign, magnitude) in enumerate(zip(_SIGN_BITS, _MAGNITUDE_BITS, strict=True)):
        units |= ((values >> sign & 1) << 3 | (values >> magnitude & 7)) << 4 * i
    return units.to(torch.int16)
