# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Quantizer of compensated activations: codes, residual codes, hot channels of rows in one pass."""

import triton
import triton.language as tl

from quads_common.kernels._coding import (
    INFINITY,
    decode_e4m3,
    magnitude_bits,
    pack_codes,
    quantize_blocks,
    row_global_scale_inv,
)
from quads_common.kernels._quantize import E4M3_NAN, load_rows, store_operand
from quads_common.kernels._route import local_expert
from quads_common.kernels._twice import hot_channels, quantize_twice

# ``compensation.fold``: hot values are shifted below 2^15 by at most 2^126.
LARGEST_EXPONENT = tl.constexpr(15)
LARGEST_SHIFT = tl.constexpr(126)


@triton.jit
def power_of_two(exponent):
    """2^exponent as float32, -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def hot_shift(largest, global_scale):
    """The shift k of each row: ``largest`` holds the bits of the largest hot magnitude. int32."""
    # Exponents as of frexp; below the normal range the shift is 0 whatever they are.
    exponent = (largest >> 23) - (global_scale.to(tl.int32, bitcast=True) >> 23)
    shift = tl.maximum(exponent + 1 - LARGEST_EXPONENT, 0)
    return tl.where(largest < INFINITY, tl.minimum(shift, LARGEST_SHIFT), 0)


@triton.jit
def store_codes(packed_ptr, scale_ptr, code, scale, bad, row, block, width, inside,
                ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Packed codes and scale bytes of rows; ``bad`` rows get NaN scales."""
    byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
    target = packed_ptr + row[:, None, None] * (width // 2) + byte[None, :, :]
    tl.store(target, pack_codes(code, ROWS, BLOCKS), mask=inside[:, :, None])
    target = scale_ptr + row[:, None] * (width // 16) + block[None, :]
    tl.store(target, tl.where(bad[:, None], E4M3_NAN, scale).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows", "map_size", "num_experts"])
def compensate_rows_kernel(
    x_ptr, factor_ptr, block_mask_ptr, channels_ptr, bits_ptr, operand_ptr,
    global_ptr, hot_ptr, packed_ptr, scale_ptr, residual_packed_ptr, residual_scale_ptr,
    sample_ptr, staged_ptr, staged_group_ptr, ids_ptr, map_ptr,
    map_size, num_experts, rows, stride_row, limit, act_alpha, beta, alpha,
    WIDTH: tl.constexpr, PLANE: tl.constexpr, PARTS: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, RAC: tl.constexpr, CHANNELS: tl.constexpr,
    MANY_MASKS: tl.constexpr, MANY_LISTS: tl.constexpr, FOLD_RESIDUAL: tl.constexpr,
    HOT: tl.constexpr, SLOTS: tl.constexpr, PACKED: tl.constexpr, STAGED: tl.constexpr,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, NEXT_MAY_START: tl.constexpr,
):  # fmt: skip
    """Activation, then ``operands.compensated_operands`` and ``fold`` of rows. Grid: (row tiles,).

    x: [rows, WIDTH] (2 * WIDTH if gated). block_mask: [lists, WIDTH / 16] bytes, with RAC.
    channels: [lists, CHANNELS] int32, -1 for none; 0 CHANNELS are no splice. The list of a row is
    its expert's if there are MANY, else the first. bits: [lists, WIDTH / 16] int32, the same as
    bits of blocks. global: [rows] float32.

    operand: [rows, PARTS, 8, PLANE], 16-bit; 0 PARTS: none. Part 0 is code * block scale, to which
    FOLD_RESIDUAL adds alpha times that of the residual; else the residual is part 1. HOT, where hot
    values go: "fold" into part 0, "part" into the last part at their own places, "list" to hot
    [rows, SLOTS], in the order of the list. Rows of skipped slots are left alone.

    STAGED: rows of a token whose x (after its factor or activation) is kept where sample [tokens]
    gives the token a place, with the row's list, in staged and staged_group (``Staging``); 0: none.
    """
    if NEXT_MAY_START:  # it waits for the results itself (sm_90)
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    expert = tl.zeros((ROWS,), tl.int32)
    if HAS_IDS:
        ids = tl.load(ids_ptr + row, mask=row_inside, other=-1)
        expert = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP)
        row_inside = expert >= 0
    expert = tl.where(row_inside, expert, 0).to(tl.int64)
    row = tl.where(row_inside, row, 0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = row_inside[:, None] & (block * 16 < WIDTH)[None, :]
    # All loads come before the first reduction, behind which the compiler would leave them waiting.
    if RAC:
        masks = (expert if MANY_MASKS else expert * 0)[:, None] * (WIDTH // 16) + block[None, :]
        chosen = tl.load(block_mask_ptr + masks, mask=inside, other=0) != 0
    if CHANNELS > 0:
        lists = (expert if MANY_LISTS else expert * 0)[:, None]
        bits = tl.load(bits_ptr + lists * (WIDTH // 16) + block[None, :], mask=inside, other=0)
        hot = hot_channels(bits)
    if STAGED > 0:
        place = tl.load(sample_ptr + row // STAGED, mask=row_inside, other=-1)
    x = load_rows(
        x_ptr, factor_ptr, stride_row, row, column[None, :, :], inside[:, :, None], WIDTH, limit,
        act_alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR,
    )  # fmt: skip
    if STAGED > 0:
        kept = place >= 0
        place = place.to(tl.int64) * STAGED + row % STAGED
        target = staged_ptr + place[:, None, None] * WIDTH + column[None, :, :]
        value = x.to(staged_ptr.dtype.element_ty)
        tl.store(target, value, mask=inside[:, :, None] & kept[:, None, None])
        tl.store(staged_group_ptr + place, expert.to(tl.int32), mask=kept)
    if HOT == "list":
        place = tl.arange(0, SLOTS)[None, :]
        slot_inside = row_inside[:, None] & (place < CHANNELS)
        channel = tl.load(channels_ptr + lists * CHANNELS + place, mask=slot_inside, other=-1)
        # From memory again: moving them between the threads that hold the row takes far longer.
        hot_value = load_rows(
            x_ptr, factor_ptr, stride_row, row, channel[:, :, None], (channel >= 0)[:, :, None],
            WIDTH, limit, act_alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR,
        )  # fmt: skip
        target = hot_ptr + row[:, None] * CHANNELS + place
        hot_value = hot_value.reshape(ROWS, SLOTS).to(hot_ptr.dtype.element_ty)
        tl.store(target, hot_value, mask=slot_inside)
    cold = tl.where(hot, 0.0, x) if CHANNELS > 0 else x
    amax = tl.max(tl.max(magnitude_bits(cold), 2), 1)
    bad = amax >= INFINITY
    inverse = row_global_scale_inv(tl.where(bad, 0, amax))
    global_scale = tl.math.div_rn(1.0, inverse)
    cold = tl.where(bad[:, None, None], 0.0, cold)
    if RAC:
        quantized, _, residual, code, scale, code_r, scale_r = quantize_twice(
            cold, inverse[:, None], global_scale[:, None]
        )
        residual = tl.where(bad[:, None, None], float("nan"), residual)
        residual = tl.where(chosen[:, :, None], residual, 0.0)
        if PACKED:
            code_r = tl.where(chosen[:, :, None], code_r, 0)
            store_codes(
                residual_packed_ptr, residual_scale_ptr, code_r, tl.where(chosen, scale_r, 0), bad,
                row, block, WIDTH, inside, ROWS, BLOCKS,
            )  # fmt: skip
        if FOLD_RESIDUAL:
            quantized = quantized + alpha * residual
        else:
            store_operand(operand_ptr, residual, row * PARTS + 1, row_inside, PLANE, ROWS, BLOCKS)
    else:
        value, code, scale = quantize_blocks(cold, inverse[:, None], global_scale[:, None])
        quantized = value * decode_e4m3(scale)[:, :, None]
    if PACKED:
        store_codes(
            packed_ptr, scale_ptr, code, scale, bad, row, block, WIDTH, inside, ROWS, BLOCKS
        )
    if HOT == "fold":
        largest = tl.max(tl.max(tl.where(hot, magnitude_bits(x), 0), 2), 1)
        shift = hot_shift(largest, global_scale)
        down = power_of_two(-shift)[:, None, None]
        hot_value = (x * down) * tl.math.div_rn(1.0, global_scale)[:, None, None]
        quantized = tl.where(hot, hot_value, quantized * down)
        global_scale = global_scale * power_of_two(shift)
    elif HOT == "part":
        hot_value = tl.where(hot, x, 0.0)
        part = row * PARTS + (PARTS - 1)
        store_operand(operand_ptr, hot_value, part, row_inside, PLANE, ROWS, BLOCKS)
    if PARTS > 0:
        quantized = tl.where(bad[:, None, None], float("nan"), quantized)
        quantized = tl.where((block * 16 < WIDTH)[None, :, None], quantized, 0.0)
        store_operand(operand_ptr, quantized, row * PARTS, row_inside, PLANE, ROWS, BLOCKS)
    tl.store(global_ptr + row, tl.where(bad, float("nan"), global_scale), mask=row_inside)
