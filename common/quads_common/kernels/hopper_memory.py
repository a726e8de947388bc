"""Shared memory of the kernels of ``cuda/moe.cu``: rows, lists, and copies of BF16 columns.

In this order. Copies are made where several warps share a strip, in the "few" kernels. The kernels
are compiled with these numbers (``layout_defines``) and check that what they address fits them.
"""

from dataclasses import dataclass

from quads_common.kernels.hopper_columns import NO_COLUMNS, Counts

__all__ = [
    "ALL_SHARED",
    "FEW_ROWS",
    "FEW_SHARED",
    "SHARED",
    "WARPS",
    "Launch",
    "few_capacity",
    "fused_capacity",
    "launches",
    "layout_defines",
    "pair_capacity",
    "parts",
    "row_bytes",
]

# Shared memory of a thread block, and the part of it that is not left to static variables.
ALL_SHARED, SHARED = 227 * 1024, 208 * 1024
# The same of the "few" kernels, which hold the parts of their sums too.
FEW_SHARED = SHARED - 16 * 1024
# Rows of a block of the "few" kernels.
FEW_ROWS = 8
# Warps of a thread block, rows of a strip.
WARPS, STRIP = 16, 32


@dataclass(frozen=True)
class Launch:
    """Of a kernel: the rows it has room for, where copies of columns begin, bytes of it all."""

    kernel: str
    rows: int
    buffer: int
    shared: int


def row_bytes(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> tuple[int, int]:
    """Bytes of a row of each GEMM in shared memory: operand, hot values, padding.

    Rows begin 32 or 96 bytes apart, modulo 128, so that the 16 lanes that read 8 bytes at a time
    fall on different banks.
    """
    up, down = (2 * count + (0 if count % 32 else 32) for count in columns)
    return -(-hidden // 256) * 512 + up, inner * 2 + down


def _list_bytes(inner: int) -> int:
    """Of the ``Lists`` of two experts, behind the rows: bits and choice of each block."""
    return 2 * (inner // 16) * 5


def parts(width: int) -> int:
    """Warps that share a strip's K of ``width`` in the "few" kernels; its sum has as many parts.

    The most up to 4 that get the same number of 128s.
    """
    return next(count for count in (4, 3, 2, 1) if width // 128 % count == 0)


def _copy_bytes(width: int, count: int) -> int:
    """Of the copies of ``count`` columns, for all strips that a "few" kernel has at a time."""
    sharing = parts(width)
    return WARPS // sharing * STRIP * 2 * count if sharing > 1 else 0


def layout_defines(hidden: int, inner: int, columns: Counts = NO_COLUMNS) -> dict[str, str]:
    """What the kernels are compiled with of all this, for a layer of hidden size H and inner I."""
    x_row, product_row = row_bytes(hidden, inner, columns)
    numbers = {
        "WARPS": WARPS,
        "FEW_ROWS": FEW_ROWS,
        "X_ROW": x_row,
        "PRODUCT_ROW": product_row,
        "LIST_BYTES": _list_bytes(inner),
        "UP_PARTS": parts(hidden),
        "DOWN_PARTS": parts(inner),
        "UP_COPY_BYTES": _copy_bytes(hidden, columns[0]),
        "DOWN_COPY_BYTES": _copy_bytes(inner, columns[1]),
    }
    return {name: str(number) for name, number in numbers.items()}


def _fused(rows: int, hidden: int, inner: int, columns: Counts) -> Launch:
    end = rows * sum(row_bytes(hidden, inner, columns)) + _list_bytes(inner)
    return Launch("moe_both", rows, end, end)


def _half(kernel: str, rows: int, hidden: int, inner: int, columns: Counts) -> Launch:
    """Of a kernel of one GEMM, which holds the rows of two blocks."""
    down = int("down" in kernel)
    end = rows * row_bytes(hidden, inner, columns)[down] + (_list_bytes(inner) if down else 0)
    copies = _copy_bytes((hidden, inner)[down], columns[down]) if "few" in kernel else 0
    return Launch(kernel, rows, end, end + copies)


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
) -> list[Launch]:
    """The kernels of a form (``DecodePlan``) in order, for blocks of so many rows.

    Raises:
        ValueError: there is no such form.
    """
    if form == "fused":
        return [_fused(rows, hidden, inner, columns)]
    if form not in ("pair", "few"):
        raise ValueError(f"form {form!r} is not one of ['fused', 'pair', 'few']")
    found = []
    for half in ("up", "down"):
        kernel = f"moe_{half}" + ("_few" if form == "few" else "")
        free = FEW_SHARED if form == "few" else SHARED
        fitting = _half_capacity(kernel, free, hidden, inner, columns)
        if form == "few":
            fitting = min(2 * FEW_ROWS, fitting)
        found.append(_half(kernel, fitting, hidden, inner, columns))
    return found
