# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Statistics of sampled rows, merged into their buffers in place: sample, quantize, accumulate."""

import triton
import triton.language as tl

from quads_common.kernels._coding import INFINITY, magnitude_bits, row_global_scale_inv
from quads_common.kernels._quantize import load_rows
from quads_common.kernels._route import local_expert
from quads_common.kernels._twice import hot_channels, quantize_twice

# ``offered`` counts rows in its low 48 bits. While a kernel runs the others count the programs that
# have read it: the last one advances it, when nobody needs the old value any more.
TICKET = tl.constexpr(1 << 48)
# So does ``count`` with its fraction, for the tiles of a group: exact in float64 below 2^33 rows.
COUNT_TICKET = tl.constexpr(2.0**-20)
# Odd constants of ``compensation.sampling``.
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
MIX = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
NO_SLOT = tl.constexpr(2**31 - 1)


@triton.jit
def window_pick(window, PERIOD: tl.constexpr):
    """``sampling._pick``: the offset of the sampled row in each window [n] int64, as int32."""
    mixed = window * GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * MIX
    return (((mixed >> 33) & 0x7FFFFFFF) % PERIOD).to(tl.int32)


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
    _, served, quantized_r, _, _, _, scale_r = quantize_twice(cold, inverse, global_scale)
    left = served - alpha * (quantized_r * global_scale[:, :, None])
    underflow = (scale_r == 0) & (tl.max(magnitude_bits(served), 2) > 0)
    plain = served
    if SPLICE:
        inverse = row_global_scale_inv(plain_amax)[:, None]
        _, plain, _, _, _, _, _ = quantize_twice(x, inverse, tl.math.div_rn(1.0, inverse))
    plain = plain.to(tl.float64)
    served = served.to(tl.float64)
    left = left.to(tl.float64)
    plain = plain * plain
    return plain, tl.sum(plain, 2), tl.sum(served * served, 2), tl.sum(left * left, 2), underflow


@triton.jit(do_not_specialize=["tokens", "map_size", "groups"])
def observe_kernel(
    x_ptr, factor_ptr, mask_ptr, ids_ptr, map_ptr, bits_ptr,
    count_ptr, mean_ptr, m2_ptr, plain_ptr, served_ptr, left_ptr, underflow_ptr, energy_ptr,
    offered_ptr, enabled_ptr, tokens, map_size, groups,
    stride_row, limit, act_alpha, beta, alpha,
    WIDTH: tl.constexpr, PERIOD: tl.constexpr, TOP_K: tl.constexpr, ACTIVATION: tl.constexpr,
    HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, SPLICE: tl.constexpr, MANY: tl.constexpr,
    PER_CHANNEL: tl.constexpr, CHUNK: tl.constexpr, SLOTS: tl.constexpr, BLOCKS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Count one of PERIOD real tokens of a forward. Grid: (groups, tiles of BLOCKS blocks).

    x: [tokens * TOP_K, WIDTH] (2 * WIDTH if gated), any model dtype. mask: [tokens] bytes. ids:
    [tokens, TOP_K]; without them there is one group. bits: [MANY ? groups : 1, WIDTH / 16] int32,
    ``_twice.list_bits`` of the hot channels, with SPLICE. count and what follows: the buffers of
    ``ChannelStatistics``, float64, offered int64. Nothing is touched while ``enabled`` is 0.

    A tile of a group has one program, which adds the group's rows in the order of their slots, one
    by one (Welford), so results do not depend on the schedule. SLOTS: TOP_K as a power of two.
    """
    if tl.load(enabled_ptr) == 0:
        return
    group = tl.program_id(0)
    tile = tl.program_id(1)
    old = tl.atomic_add(offered_ptr, TICKET)
    before = tl.atomic_add(count_ptr + group, COUNT_TICKET)
    offered = old & (TICKET - 1)
    first_window = offered // PERIOD
    phase = (offered - first_window * PERIOD).to(tl.int32)
    rows = before.to(tl.int64).to(tl.float64)
    ticket = before - rows
    real = 0
    for start in range(0, tokens, CHUNK):
        token = start + tl.arange(0, CHUNK)
        counted = token < tokens
        if HAS_MASK:
            counted = tl.load(mask_ptr + token, mask=counted, other=0) != 0
        ordinal = phase + real + tl.cumsum(counted.to(tl.int32), 0) - 1
        real += tl.sum(counted.to(tl.int32))
        window = ordinal // PERIOD
        pick = window_pick(first_window + window, PERIOD)
        take = counted & (ordinal - window * PERIOD == pick)
        k = tl.arange(0, SLOTS)[None, :]
        slot = token[:, None] * TOP_K + k
        mine = take[:, None] & (k < TOP_K)
        if HAS_IDS:
            ids = tl.load(ids_ptr + slot, mask=mine, other=-1)
            mine = local_expert(ids, map_ptr, map_size, groups, HAS_MAP) == group
        slot = tl.ravel(tl.where(mine, slot, NO_SLOT))
        if tl.min(slot, 0) < NO_SLOT:
            rows = add_rows(
                slot, group.to(tl.int64), tile, rows, x_ptr, factor_ptr, bits_ptr, mean_ptr, m2_ptr,
                plain_ptr, served_ptr, left_ptr, underflow_ptr, energy_ptr, stride_row, limit,
                act_alpha, beta, alpha, WIDTH, ACTIVATION, HAS_LIMIT, HAS_FACTOR, SPLICE, MANY,
                PER_CHANNEL, BLOCKS, ROW_BLOCKS,
            )  # fmt: skip
    if ticket == (tl.num_programs(1) - 1) * COUNT_TICKET:
        tl.store(count_ptr + group, rows)
    if (old >> 48) == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(offered_ptr, offered + real)


@triton.jit
def add_rows(
    slot, group, tile, rows, x_ptr, factor_ptr, bits_ptr, mean_ptr, m2_ptr, plain_ptr, served_ptr,
    left_ptr, underflow_ptr, energy_ptr, stride_row, limit, act_alpha, beta, alpha,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HAS_FACTOR: tl.constexpr, SPLICE: tl.constexpr, MANY: tl.constexpr,
    PER_CHANNEL: tl.constexpr, BLOCKS: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Add the rows whose numbers stand in ``slot`` [n] int32 (NO_SLOT: none), in ascending order.

    rows: counted before, float64. Returns those counted then: a row with NaN or Inf is left out.
    """
    width_blocks: tl.constexpr = WIDTH // 16
    bits_ptr += (group if MANY else 0) * width_blocks
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < width_blocks)[None, :]
    channel = (group * WIDTH + column)[None, :, :]
    at = (group * width_blocks + block)[None, :]
    mean = tl.load(mean_ptr + channel, mask=inside[:, :, None], other=0.0)
    m2 = tl.load(m2_ptr + channel, mask=inside[:, :, None], other=0.0)
    plain = tl.load(plain_ptr + at, mask=inside, other=0.0)
    served = tl.load(served_ptr + at, mask=inside, other=0.0)
    left = tl.load(left_ptr + at, mask=inside, other=0.0)
    underflows = tl.load(underflow_ptr + at, mask=inside, other=0.0)
    energy = mean
    if PER_CHANNEL:
        energy = tl.load(energy_ptr + channel, mask=inside[:, :, None], other=0.0)
    hot = inside[:, :, None]
    if SPLICE:
        bits = tl.load(bits_ptr + block[None, :], mask=inside, other=0)
        hot = hot_channels(bits)
    chosen = tl.min(slot, 0)
    while chosen < NO_SLOT:
        row = tl.full((1,), 0, tl.int64) + chosen
        x = load_rows(
            x_ptr, factor_ptr, stride_row, row, column[None, :, :], inside[:, :, None], WIDTH,
            limit, act_alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR,
        )  # fmt: skip
        plain_amax, cold_amax = row_maxima(
            row, x_ptr, factor_ptr, bits_ptr, stride_row, limit, act_alpha, beta,
            WIDTH, ACTIVATION, HAS_LIMIT, HAS_FACTOR, SPLICE, ROW_BLOCKS,
        )  # fmt: skip
        if tl.max(plain_amax, 0) < INFINITY:
            rows += 1.0
            value = x.to(tl.float64)
            delta = value - mean
            mean += delta * (1.0 / rows)
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
        chosen = tl.min(tl.where(slot > chosen, slot, NO_SLOT), 0)
    tl.store(mean_ptr + channel, mean, mask=inside[:, :, None])
    tl.store(m2_ptr + channel, m2, mask=inside[:, :, None])
    tl.store(plain_ptr + at, plain, mask=inside)
    tl.store(served_ptr + at, served, mask=inside)
    tl.store(left_ptr + at, left, mask=inside)
    tl.store(underflow_ptr + at, underflows, mask=inside)
    if PER_CHANNEL:
        tl.store(energy_ptr + channel, energy, mask=inside[:, :, None])
    return rows


@triton.jit
def row_maxima(
    row, x_ptr, factor_ptr, bits_ptr, stride_row, limit, act_alpha, beta,
    WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr,
    HAS_FACTOR: tl.constexpr, SPLICE: tl.constexpr, ROW_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Bits of the largest |x| of a row [1]: of all channels, and of those that are not hot."""
    plain = tl.zeros((1,), tl.int32)
    cold = tl.zeros((1,), tl.int32)
    for start in range(0, WIDTH // 16, ROW_BLOCKS):
        block = start + tl.arange(0, ROW_BLOCKS)
        column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        inside = (block < WIDTH // 16)[None, :]
        x = load_rows(
            x_ptr, factor_ptr, stride_row, row, column[None, :, :], inside[:, :, None], WIDTH,
            limit, act_alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR,
        )  # fmt: skip
        bits = magnitude_bits(x)
        plain = tl.maximum(plain, tl.max(tl.max(bits, 2), 1))
        if SPLICE:
            hot = hot_channels(tl.load(bits_ptr + block[None, :], mask=inside, other=0))
            bits = tl.where(hot, 0, bits)
        cold = tl.maximum(cold, tl.max(tl.max(bits, 2), 1))
    return plain, cold
