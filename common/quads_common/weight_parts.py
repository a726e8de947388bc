"""What arrives when weights are loaded: checkpoint tensors, and where their shards go in a unit."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from quads_common.format import INPUT_DTYPES, check_block_aligned

__all__ = ["NO_PIECE", "OpenUnit", "Piece", "Region", "check_incoming"]


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


@dataclass(frozen=True)
class Piece:
    """What this rank takes of a part's full tensor.

    Its rows row_offset.. and columns k_offset.. are the unit's rows first_row.., ``rows`` of them.
    """

    rows: int
    first_row: int = 0
    row_offset: int = 0
    k_offset: int = 0

    def __post_init__(self) -> None:
        check_block_aligned(self.k_offset, "k_offset")


NO_PIECE = Piece(0)


@dataclass(slots=True)
class OpenUnit:
    """A unit of which some parts have arrived.

    buffer: [N, K] bf16, this rank's shard. sources: checkpoint name by part. amax: by part, on a
    CPU only. mask: the parts as bits, on a GPU only. changed: when, as ``WeightUnits.now`` counts.
    """

    buffer: torch.Tensor | None = None
    sources: dict[str, str] = field(default_factory=dict)
    amax: dict[str, torch.Tensor] = field(default_factory=dict)
    mask: int = 0
    changed: int = 0


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
