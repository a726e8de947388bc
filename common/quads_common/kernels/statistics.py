"""``compensation.staging.count_staged`` of all inputs of a model in a few launches.

Inputs that have their shapes in common are counted by one pair of kernels: the first finds the
maxima of every row, the second quantizes as served and merges the rows into the buffers. Sums are
float64 in the order of the rows, one program for each tile of a group. Atomics only count programs,
in the spare bits of a counter.
"""

from collections.abc import Sequence

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from quads_common.compensation.staging import StagedInput
from quads_common.format import check_block_aligned
from quads_common.kernels import _statistics
from quads_common.kernels.compensated_rows import check_hot_bits
from quads_common.kernels.rows import check_dtype

__all__ = ["count_staged_triton"]

# Rows that a program looks at together.
CHUNK = 256
# Blocks of a program's tile, and its warps.
TILE_BLOCKS = 8
WARPS = 2
# Blocks of a row that are held in registers to find the row's maximum.
ROW_BLOCKS = 64

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def count_staged_triton(inputs: Sequence[StagedInput], offered: int) -> None:
    """See ``count_staged``. All buffers are contiguous and lie at multiples of 16 bytes.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit, naming them.
    """
    alike: dict[tuple, list[StagedInput]] = {}
    for staged in inputs:
        _check(staged)
        alike.setdefault(_shape(staged), []).append(staged)
    for group in alike.values():
        _launch(group, offered)


def _launch(inputs: list[StagedInput], offered: int) -> None:
    """Inputs of one shape."""
    first = inputs[0]
    groups, width = first.statistics.mean.shape
    rows = first.rows.shape[0]
    if rows == 0 or groups == 0:
        return
    device = first.rows.device
    table = _table(inputs, device)
    found = torch.empty((3, len(inputs), rows), dtype=torch.int32, device=device)
    bits = first.served.hot_bits
    blocks = triton.next_power_of_2(width // 16)
    shape = {
        "WIDTH": width,
        "DTYPE": _TYPES[first.rows.dtype],
        "SPLICE": bits is not None,
        "MANY": bits is not None and bits.shape[0] > 1,
        "num_warps": WARPS,
    }
    _statistics.measure_rows_kernel[(len(inputs), rows)](
        table, found, rows, offered, GROUPS=groups, BLOCKS=min(ROW_BLOCKS, blocks),
        enable_fp_fusion=False, **shape,
    )  # fmt: skip
    tile = min(TILE_BLOCKS, blocks)
    _statistics.observe_kernel[(groups, triton.cdiv(width, tile * 16), len(inputs))](
        table, found, rows, first.served.alpha, CHUNK=CHUNK, BLOCKS=tile,
        PER_CHANNEL=first.statistics.channel_energy.shape[1] > 0, enable_fp_fusion=False, **shape,
    )  # fmt: skip


def _shape(staged: StagedInput) -> tuple:
    """What the inputs of a launch have in common."""
    bits, stats = staged.served.hot_bits, staged.statistics
    return (
        tuple(stats.mean.shape),
        stats.channel_energy.shape[1],
        tuple(staged.rows.shape),
        staged.rows.dtype,
        None if bits is None else tuple(bits.shape),
        staged.served.alpha,
    )


def _addresses(staged: StagedInput) -> tuple[int, ...]:
    """A line of the table, as ``_statistics`` names its columns."""
    stats, bits = staged.statistics, staged.served.hot_bits
    tensors = [
        staged.rows, staged.groups, staged.groups if bits is None else bits, stats.count,
        stats.mean, stats.m2, stats.plain_energy, stats.served_energy, stats.left_energy,
        stats.underflows, stats.channel_energy if stats.channel_energy.numel() else stats.m2,
        stats.offered,
    ]  # fmt: skip
    return tuple(t.data_ptr() for t in tensors)


def _table(inputs: list[StagedInput], device: torch.device) -> torch.Tensor:
    """On the device. Made anew each time: memory of an engine may be discarded while it sleeps."""
    lines = [_addresses(staged) for staged in inputs]
    odd = [address for line in lines for address in line if address % 16]
    if odd:
        raise ValueError(f"buffers must lie at multiples of 16 bytes, one is at {odd[0]:#x}")
    on_host = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _check(staged: StagedInput) -> None:
    check_dtype(staged.rows)
    stats = staged.statistics
    groups, width = stats.mean.shape
    check_block_aligned(width, f"statistics of {width} channels")
    if staged.rows.ndim != 2 or staged.rows.shape[1] != width:
        raise ValueError(f"rows must be [R, {width}], got {list(staged.rows.shape)}")
    if staged.groups.shape != staged.rows.shape[:1] or staged.groups.dtype != torch.int32:
        raise ValueError(
            f"groups must be int32 [{len(staged.rows)}], got {staged.groups.dtype} "
            f"{list(staged.groups.shape)}"
        )
    bits = staged.served.hot_bits
    check_hot_bits(staged.served, width)
    if bits is not None and bits.shape[0] not in (1, groups):
        raise ValueError(f"{bits.shape[0]} channel lists for {groups} groups: one, or one each")
    tensors = (staged.rows, staged.groups, bits, *stats.buffers().values())
    if not all(t is None or t.is_contiguous() for t in tensors):
        raise ValueError("buffers of rows, lists and statistics must be contiguous")
