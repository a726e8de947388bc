"""Shared memory of the kernels of ``cuda/moe.cu``: rows, lists, and copies of BF16 columns.

In this order, but for the copies: they lie behind the rows that blocks of up to two groups of 8
slots have, where the rest of the rows' memory is large enough for them, and else behind the lists.
Larger blocks make no copies.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from quads_common.kernels.hopper_columns import NO_COLUMNS, Counts

__all__ = [
    "ALL_SHARED",
    "COPIED_COLUMNS",
    "COPIED_FEW",
    "FEW_ROWS",
    "FEW_SHARED",
    "SHARED",
    "Launch",
    "few_capacity",
    "fused_capacity",
    "launches",
    "pair_capacity",
    "row_bytes",
]

# Shared memory of a thread block, and the part of it that is not left to static variables.
ALL_SHARED, SHARED = 227 * 1024, 208 * 1024
# The same of the "few" kernels, which hold the parts of their sums too.
FEW_SHARED = SHARED - 16 * 1024
# Rows of a block of the "few" kernels.
FEW_ROWS = 8
# Of strips.cuh: rows of a block that makes copies, at most, and columns that are copied; warps, and
# rows of a strip.
EARLY_ROWS, COPIED_COLUMNS, COPIED_FEW = 16, 64, 32
WARPS, STRIP = 16, 32


@dataclass(frozen=True)
class Launch:
    """Of a kernel: the rows it has room for, where copies of columns begin, bytes of it all."""

    kernel: str
    rows: int
    buffer: int
    shared: int


def row_bytes(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> tuple[int, int]:
    """Bytes of a row of each GEMM in shared memory: ``X_ROW`` and ``PRODUCT_ROW`` of strips.cuh."""
    up, down = (2 * count + (0 if count % 32 else 32) for count in columns)
    return -(-hidden // 256) * 512 + up, inner * 2 + down


def _list_bytes(inner: int) -> int:
    """Of the ``Lists`` of two experts, behind the rows: bits and choice of each block."""
    return 2 * (inner // 16) * 5


def _copy_bytes(count: int, copied: int) -> int:
    """Of all warps' copies of a strip's columns."""
    return WARPS * STRIP * 2 * min(count, copied)


def _place(kernel: str, rows: int, used: int, row: int, others: int, copies: int) -> Launch:
    """used: rows of blocks that make copies; row: bytes of one; others: all bytes but the rows'."""
    used, end = min(used, rows), rows * row + others
    if (rows - used) * row >= copies:
        return Launch(kernel, rows, used * row, end)
    return Launch(kernel, rows, end, end + copies)


def _fused(rows: int, hidden: int, inner: int, columns: Counts) -> Launch:
    up, down = row_bytes(hidden, inner, columns)
    copies = max(_copy_bytes(count, COPIED_COLUMNS) for count in columns)
    return _place("moe_both", rows, EARLY_ROWS, up, rows * down + _list_bytes(inner), copies)


def _half(kernel: str, rows: int, hidden: int, inner: int, columns: Counts) -> Launch:
    """Of a kernel of one GEMM, which holds the rows of two blocks."""
    down, few = int("down" in kernel), "few" in kernel
    row, copied = row_bytes(hidden, inner, columns)[down], COPIED_FEW if few else COPIED_COLUMNS
    used = 2 * (FEW_ROWS if few else EARLY_ROWS)
    copies = _copy_bytes(columns[down], copied)
    return _place(kernel, rows, used, row, _list_bytes(inner) if down else 0, copies)


def fused_capacity(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> int:
    """Rows of a block of the fused kernel that fit in shared memory, in whole groups of 8."""
    rows = SHARED // sum(row_bytes(hidden, inner, columns)) // 8 * 8
    while rows > 0 and _fused(rows, hidden, inner, columns).shared > SHARED:
        rows -= 8
    return rows


def _half_capacity(kernel: str, free: int, hidden: int, inner: int, columns: Counts) -> int:
    """Rows in shared memory at a time, of a kernel of one GEMM."""
    rows = free // row_bytes(hidden, inner, columns)["down" in kernel] // 8 * 8
    while rows > 0 and _half(kernel, rows, hidden, inner, columns).shared > free:
        rows -= 8
    return rows


def pair_capacity(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> int:
    """Of both kernels of the pair."""
    return min(_half_capacity(k, SHARED, hidden, inner, columns) for k in ("moe_up", "moe_down"))


def few_capacity(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> int:
    """Of both of the "few" kernels; less than ``FEW_ROWS``: they cannot run."""
    return min(
        _half_capacity(k, FEW_SHARED, hidden, inner, columns)
        for k in ("moe_up_few", "moe_down_few")
    )


def launches(
    form: str, rows: int, hidden: int, inner: int, columns: Counts = NO_COLUMNS
) -> Iterator[Launch]:
    """The kernels of a form (``DecodePlan``) in order, for blocks of so many rows."""
    if form == "fused":
        yield _fused(rows, hidden, inner, columns)
        return
    for half in ("up", "down"):
        kernel = f"moe_{half}" + ("_few" if form == "few" else "")
        free = FEW_SHARED if form == "few" else SHARED
        fitting = _half_capacity(kernel, free, hidden, inner, columns)
        if form == "few":
            fitting = min(2 * FEW_ROWS, fitting)
        yield _half(kernel, fitting, hidden, inner, columns)
