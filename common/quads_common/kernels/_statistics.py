# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Rows that wait, merged into the statistics of many inputs at once: quantize, accumulate.

The inputs of a launch have shapes in common. Where the buffers of each lie stands in a table of
addresses, int64 [inputs, COLUMNS].
"""

import triton
import triton.language as tl

from quads_common.kernels._coding import INFINITY, magnitude_bits, row_global_scale_inv
from quads_common.kernels._twice import hot_channels, quantize_twice

# Columns of the table.
ROWS_AT = tl.constexpr(0)
GROUPS_AT = tl.constexpr(1)
BITS_AT = tl.constexpr(2)
COUNT_AT = tl.constexpr(3)
MEAN_AT = tl.constexpr(4)
M2_AT = tl.constexpr(5)
PLAIN_AT = tl.constexpr(6)
SERVED_AT = tl.constexpr(7)
LEFT_AT = tl.constexpr(8)
UNDERFLOW_AT = tl.constexpr(9)
ENERGY_AT = tl.constexpr(10)
OFFERED_AT = tl.constexpr(11)
COLUMNS = tl.constexpr(12)
# ``count`` counts the tiles of a group that have read it with its fraction; the last one advances
# it, when nobody needs the old value any more. Exact in float64 below 2^33 rows.
COUNT_TICKET = tl.constexpr(2.0**-20)
NO_ROW = tl.constexpr(2**31 - 1)


@triton.jit
def address(table_ptr, number, AT: tl.constexpr, DTYPE: tl.constexpr):
    """A pointer to elements of DTYPE; buffers lie at multiples of 16 bytes."""
    where = tl.multiple_of(tl.load(table_ptr + number * COLUMNS + AT), 16)
    return where.to(tl.pointer_type(DTYPE))


@triton.jit(do_not_specialize=["rows", "offered"])
def measure_rows_kernel(
    table_ptr, found_ptr, rows, offered,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, DTYPE: tl.constexpr, SPLICE: tl.constexpr,
    MANY: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The group and the maxima of each row that waits; the row is forgotten. Grid: (inputs, rows).

    found: [3, inputs, rows] int32: the group, -1 for a row that is not there or holds NaN or Inf;
    bits of the largest magnitude of all channels and of those that are not hot. With SPLICE hot
    channels come as bits; MANY: a list for each group, else one. offered: added to every input's.
    """
    number = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1)
    if row == 0:
        offered_ptr = address(table_ptr, number, OFFERED_AT, tl.int64)
        tl.store(offered_ptr, tl.load(offered_ptr) + offered)
    groups_ptr = address(table_ptr, number, GROUPS_AT, tl.int32)
    group = tl.load(groups_ptr + row)
    plain = tl.full((), 0, tl.int32)
    cold = tl.full((), 0, tl.int32)
    if (group >= 0) & (group < GROUPS):
        x_ptr = address(table_ptr, number, ROWS_AT, DTYPE) + row.to(tl.int64) * WIDTH
        list_ptr = address(table_ptr, number, BITS_AT, tl.int32)
        if MANY:
            list_ptr += group * (WIDTH // 16)
        for start in range(0, WIDTH // 16, BLOCKS):
            block = start + tl.arange(0, BLOCKS)
            column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
            x = tl.load(x_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
            bits = magnitude_bits(x)
            plain = tl.maximum(plain, tl.max(tl.max(bits, 1), 0))
            if SPLICE:
                lists = tl.load(list_ptr + block, mask=block < WIDTH // 16, other=0)
                hot = hot_channels(lists[None, :]).reshape(BLOCKS, 16)
                bits = tl.where(hot, 0, bits)
            cold = tl.maximum(cold, tl.max(tl.max(bits, 1), 0))
        tl.store(groups_ptr + row, -1)
        if plain >= INFINITY:
            group = -1
    else:
        group = -1
    inputs = tl.num_programs(0)
    tl.store(found_ptr + number * rows + row, group)
    tl.store(found_ptr + (inputs + number) * rows + row, plain)
    tl.store(found_ptr + (2 * inputs + number) * rows + row, cold)


@triton.jit
def row_energies(
    x, hot, cold_amax, plain_amax, alpha, SPLICE: tl.constexpr
):  # fmt: skip
    """``operands.row_energies`` of one row's blocks x [1, B, 16], given the row's maxima as bits.

    Returns float64 squares of the plain residual [1, B, 16]; sums [1, B] of them, of the served
    residual and of what is left of it; underflows [1, B] bool.
    """
    inverse = row_global_scale_inv(cold_amax)[:, None]
    global_scale = tl.math.div_rn(1.0, inverse)
    cold = tl.where(hot, 0.0, x) if SPLICE else x
    served, quantized_r, scale_r = quantize_twice(cold, inverse, global_scale)
    left = served - alpha * (quantized_r * global_scale[:, :, None])
    underflow = (scale_r == 0) & (tl.max(magnitude_bits(served), 2) > 0)
    plain = served
    if SPLICE:
        inverse = row_global_scale_inv(plain_amax)[:, None]
        plain, _, _ = quantize_twice(x, inverse, tl.math.div_rn(1.0, inverse))
    plain = plain.to(tl.float64)
    served = served.to(tl.float64)
    left = left.to(tl.float64)
    plain = plain * plain
    return plain, tl.sum(plain, 2), tl.sum(served * served, 2), tl.sum(left * left, 2), underflow


@triton.jit(do_not_specialize=["rows"])
def observe_kernel(
    table_ptr, found_ptr, rows, alpha,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, SPLICE: tl.constexpr, MANY: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Count the rows that ``measure_rows_kernel`` found. Grid: (groups, tiles of blocks, inputs).

    A tile of a group has one program, which adds the group's rows in the order of their places, one
    by one (Welford), so results do not depend on the schedule. CHUNK: rows looked at together.
    """
    group = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    number = tl.program_id(2).to(tl.int64)
    inputs = tl.num_programs(2)
    group_ptr = found_ptr + number * rows
    plain_amax_ptr = found_ptr + (inputs + number) * rows
    cold_amax_ptr = found_ptr + (2 * inputs + number) * rows
    first = first_row(group_ptr, 0, -1, group, rows, CHUNK)
    start = 0
    while (first == NO_ROW) & (start + CHUNK < rows):
        start += CHUNK
        first = first_row(group_ptr, start, -1, group, rows, CHUNK)
    if first == NO_ROW:
        return
    count_ptr = address(table_ptr, number, COUNT_AT, tl.float64) + group
    before = tl.atomic_add(count_ptr, COUNT_TICKET)
    counted = before.to(tl.int64).to(tl.float64)
    ticket = before - counted
    width_blocks: tl.constexpr = WIDTH // 16
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < width_blocks)[None, :]
    inside_channels = (block < width_blocks)[None, :, None] & (column >= 0)[None, :, :]
    channel = (group * WIDTH + column)[None, :, :]
    at = (group * width_blocks + block)[None, :]
    x_ptr = address(table_ptr, number, ROWS_AT, DTYPE)
    mean_ptr = address(table_ptr, number, MEAN_AT, tl.float64) + channel
    m2_ptr = address(table_ptr, number, M2_AT, tl.float64) + channel
    plain_ptr = address(table_ptr, number, PLAIN_AT, tl.float64) + at
    served_ptr = address(table_ptr, number, SERVED_AT, tl.float64) + at
    left_ptr = address(table_ptr, number, LEFT_AT, tl.float64) + at
    underflow_ptr = address(table_ptr, number, UNDERFLOW_AT, tl.float64) + at
    energy_ptr = address(table_ptr, number, ENERGY_AT, tl.float64) + channel
    mean = tl.load(mean_ptr, mask=inside_channels, other=0.0)
    m2 = tl.load(m2_ptr, mask=inside_channels, other=0.0)
    plain = tl.load(plain_ptr, mask=inside, other=0.0)
    served = tl.load(served_ptr, mask=inside, other=0.0)
    left = tl.load(left_ptr, mask=inside, other=0.0)
    underflows = tl.load(underflow_ptr, mask=inside, other=0.0)
    energy = mean
    if PER_CHANNEL:
        energy = tl.load(energy_ptr, mask=inside_channels, other=0.0)
    hot = inside[:, :, None]
    if SPLICE:
        list_ptr = address(table_ptr, number, BITS_AT, tl.int32)
        if MANY:
            list_ptr += group * width_blocks
        bits = tl.load(list_ptr + block, mask=block < width_blocks, other=0)
        hot = hot_channels(bits[None, :])
    while start < rows:
        chosen = first_row(group_ptr, start, -1, group, rows, CHUNK)
        while chosen != NO_ROW:
            row = tl.full((1,), 0, tl.int64) + chosen
            plain_amax = tl.load(plain_amax_ptr + row)
            cold_amax = tl.load(cold_amax_ptr + row)
            x = tl.load(
                x_ptr + row[:, None, None] * WIDTH + column[None, :, :], mask=inside_channels,
                other=0.0,
            ).to(tl.float32)  # fmt: skip
            chosen = first_row(group_ptr, start, chosen, group, rows, CHUNK)
            counted += 1.0
            value = x.to(tl.float64)
            delta = value - mean
            mean += delta * (1.0 / counted)
            m2 += delta * (value - mean)
            squares, one, two, three, underflow = row_energies(
                x, hot, cold_amax, plain_amax, alpha, SPLICE
            )
            plain += one
            served += two
            left += three
            underflows += underflow.to(tl.float64)
            if PER_CHANNEL:
                energy += squares
        start += CHUNK
    tl.store(mean_ptr, mean, mask=inside_channels)
    tl.store(m2_ptr, m2, mask=inside_channels)
    tl.store(plain_ptr, plain, mask=inside)
    tl.store(served_ptr, served, mask=inside)
    tl.store(left_ptr, left, mask=inside)
    tl.store(underflow_ptr, underflows, mask=inside)
    if PER_CHANNEL:
        tl.store(energy_ptr, energy, mask=inside_channels)
    if ticket == (tl.num_programs(1) - 1) * COUNT_TICKET:
        tl.store(count_ptr, counted)


@triton.jit
def first_row(group_ptr, start, after, group, rows, CHUNK: tl.constexpr):
    """The first row of a group behind ``after``, of CHUNK rows from ``start`` on; NO_ROW: none."""
    row = start + tl.arange(0, CHUNK)
    mine = tl.load(group_ptr + row, mask=row < rows, other=-1) == group
    return tl.min(tl.where(mine & (row > after), row, NO_ROW), 0)
