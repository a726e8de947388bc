# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Quantizer of compensated activations: codes, residual codes, hot channels of rows in one pass."""

import triton
import triton.language as tl

from quads_common.kernels._blocks import (
    block_amax_bits,
    code_word,
    elements,
    store_codes,
    store_held,
    store_values,
)
from quads_common.kernels._coding import INFINITY, row_global_scale_inv
from quads_common.kernels._quantize import E4M3_NAN, load_activations, load_rows
from quads_common.kernels._route import local_expert
from quads_common.kernels._twice import (
    UNIT,
    signed_bits,
    split_hot,
    tile_residual,
    tile_scales,
    tile_values,
)

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
def larger_of_each(a, b, other_a, other_b):
    return tl.maximum(a, other_a), tl.maximum(b, other_b)


@triton.jit
def scaled(x, unit):
    """The elements of a tile times a factor of each block [B, R]."""
    result = ()
    for i in tl.static_range(4):
        result += (x[i] * unit[:, :, None],)
    return result


@triton.jit
def add_residual(values, residual, encode, factor, alpha, SCALED: tl.constexpr):
    """values + alpha * ``tile_values`` of the residual. SCALED: alpha is not 1."""
    factor = factor[:, :, None]
    result = ()
    for i in tl.static_range(4):
        bits = signed_bits(residual[i], encode)
        if SCALED:
            result += (values[i] + alpha * (bits * factor),)
        else:
            # The product is exact.
            result += (tl.fma(bits, factor, values[i]),)
    return result


@triton.jit
def store_packed(
    packed_ptr, scale_ptr, x, encode, scale, live, bad, row, block, inside, WIDTH: tl.constexpr
):
    """Packed codes and scale bytes of rows; ``bad`` rows get NaN scales, dead blocks codes 0."""
    live = live & (bad == 0)
    first = tl.where(live, code_word(x[0], x[1], encode), 0)
    second = tl.where(live, code_word(x[2], x[3], encode), 0)
    target = packed_ptr + (row[None, :] * (WIDTH // 2) + block[:, None] * 8)
    store_codes(target, first, second, inside, True)
    target = scale_ptr + (row[None, :] * (WIDTH // 16) + block[:, None])
    tl.store(target, tl.where(bad, E4M3_NAN, scale).to(tl.uint8), mask=inside)


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
    SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, PTX: tl.constexpr, NEXT_MAY_START: tl.constexpr,
):  # fmt: skip
    """Activation, then ``operands.compensated_operands`` and ``fold`` of rows. Grid: (row tiles,).

    x: [rows, WIDTH] (2 * WIDTH if gated). block_mask: [lists, WIDTH / 16] bytes, with RAC.
    channels: [lists, CHANNELS] int32, -1 for none; 0 CHANNELS are no splice. The list of a row is
    its expert's if there are MANY, else the first. bits: [lists, WIDTH / 16] int32, the same as
    bits of blocks. global: [rows] float32.

    operand: [rows, PARTS, 8, PLANE], 16-bit; 0 PARTS: none. Part 0 is code * block scale, to which
    FOLD_RESIDUAL adds that of the residual, times alpha if SCALED; else the residual is part 1.
    HOT, where hot values go: "fold" into part 0, "part" into the last part at their own places,
    "list" to hot [rows, SLOTS], in the order of the list. Rows of skipped slots are left alone.

    STAGED: rows of a token whose x (after its factor or activation) is kept where sample [tokens]
    gives the token a place, with the row's list, in staged and staged_group (``Staging``); 0: none.

    Tiles, WIDE and PTX: as of ``quantize_rows_kernel``; with WIDE staged rows are aligned too.
    """
    if NEXT_MAY_START:  # it waits for the results itself (sm_90)
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    expert = tl.zeros((ROWS,), tl.int32)
    if HAS_IDS:
        ids = tl.load(ids_ptr + row, mask=row_inside, other=-1)
        expert = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP)
        row_inside = expert >= 0
    expert = tl.where(row_inside, expert, 0).to(tl.int64)
    row = tl.where(row_inside, row, 0).to(tl.int64)
    # All loads come before the first store and the first reduction, behind which the compiler would
    # leave them waiting.
    if STAGED > 0:
        place = tl.load(sample_ptr + row // STAGED, mask=row_inside, other=-1)
    if HOT == "list":
        slot = tl.arange(0, SLOTS)[None, :]
        slot_inside = row_inside[:, None] & (slot < CHANNELS)
        lists = (expert if MANY_LISTS else expert * 0)[:, None] * CHANNELS
        channel = tl.load(channels_ptr + lists + slot, mask=slot_inside, other=-1)
    chosen, bits, blocks = (), (), ()
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        inside = row_inside[None, :] & (block * 16 < WIDTH)[:, None]
        if RAC:
            masks = (expert if MANY_MASKS else expert * 0)[None, :] * (WIDTH // 16)
            mask = tl.load(block_mask_ptr + (masks + block[:, None]), mask=inside, other=0)
            chosen += (mask != 0,)
        if CHANNELS > 0:
            lists = (expert if MANY_LISTS else expert * 0)[None, :] * (WIDTH // 16)
            bits += (tl.load(bits_ptr + (lists + block[:, None]), mask=inside, other=0),)
        x = load_activations(
            x_ptr, factor_ptr, stride_row, row, block, inside, limit, act_alpha, beta, WIDTH,
            ACTIVATION, HAS_LIMIT, HAS_FACTOR, WIDE, PTX,
        )  # fmt: skip
        blocks += (x,)
    if HOT == "list":
        # From memory again: moving them between the threads that hold the row takes far longer.
        hot_value = load_rows(
            x_ptr, factor_ptr, stride_row, row, channel[:, :, None], (channel >= 0)[:, :, None],
            WIDTH, limit, act_alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR, PTX,
        )  # fmt: skip
        target = hot_ptr + row[:, None] * CHANNELS + slot
        hot_value = hot_value.reshape(ROWS, SLOTS).to(hot_ptr.dtype.element_ty)
        tl.store(target, hot_value, mask=slot_inside)
    if STAGED > 0:
        kept = row_inside & (place >= 0)
        place = place.to(tl.int64) * STAGED + row % STAGED
        tl.store(staged_group_ptr + place, expert.to(tl.int32), mask=kept)
        for chunk in tl.static_range(CHUNKS):
            block = chunk * BLOCKS + tl.arange(0, BLOCKS)
            target = staged_ptr + (place[None, :] * WIDTH + block[:, None] * 16)
            inside = kept[None, :] & (block * 16 < WIDTH)[:, None]
            store_held(target, blocks[chunk], dtype, inside, WIDE)
    amaxes = ()
    largest = tl.zeros((BLOCKS, ROWS), tl.int32)
    for chunk in tl.static_range(CHUNKS):
        cold = blocks[chunk]
        if CHANNELS > 0:
            cold, hot = split_hot(cold, bits[chunk], dtype)
            if HOT == "fold":
                largest = tl.maximum(largest, block_amax_bits(elements(hot, dtype)))
        amaxes += (block_amax_bits(elements(cold, dtype)),)
    amax = amaxes[0]
    for chunk in tl.static_range(1, CHUNKS):
        amax = tl.maximum(amax, amaxes[chunk])
    if HOT == "fold":
        amax, largest = tl.reduce((amax, largest), 0, larger_of_each)
    else:
        amax = tl.max(amax, 0)
    # 0, which the compiler does not know: it would keep what the loop above has split, several
    # times the registers of x and bits, which of a single chunk are few.
    nothing = (amax >> 31)[None, :] if CHUNKS > 1 else 0
    bad = amax >= INFINITY
    inverse = row_global_scale_inv(tl.where(bad, 0, amax))
    global_scale = tl.math.div_rn(1.0, inverse)
    row_scale = tl.where(bad, float("nan"), global_scale)
    whole = tl.where(bad, float("nan"), UNIT)
    if HOT == "fold":
        shift = hot_shift(largest, global_scale)
        down = power_of_two(-shift)
        hot_inverse = tl.math.div_rn(1.0, row_scale)[None, :]
        row_scale = row_scale * power_of_two(shift)
        whole = whole * down
        down = down[None, :, None]
    tl.store(global_ptr + row, row_scale, mask=row_inside)
    inverse, global_scale, bad = inverse[None, :], global_scale[None, :], bad[None, :]
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        inside = row_inside[None, :] & (block * 16 < WIDTH)[:, None]
        operand_inside = row_inside[None, :] & (block * 2 < PLANE)[:, None]
        operand = operand_ptr + (row[None, :] * (PARTS * PLANE * 8) + block[:, None] * 2)
        # 0 in padding, NaN in bad rows.
        unit = tl.where((block * 16 < WIDTH)[:, None], whole[None, :], 0.0)
        cold = blocks[chunk]
        if CHANNELS > 0:
            cold, hot = split_hot(cold, bits[chunk] + nothing, dtype)
        x = elements(cold, dtype)
        scale, encode, factor, live = tile_scales(amaxes[chunk], inverse, global_scale)
        values = tile_values(x, encode, factor)
        if PACKED:
            store_packed(
                packed_ptr, scale_ptr, x, encode, scale, live, bad, row, block, inside, WIDTH
            )
        if RAC:
            mask = chosen[chunk]
            residual, amax_r = tile_residual(x, values, global_scale)
            scale_r, encode_r, factor_r, live_r = tile_scales(amax_r, inverse, global_scale)
            if PACKED:
                store_packed(
                    residual_packed_ptr, residual_scale_ptr, residual, encode_r,
                    tl.where(mask, scale_r, 0), live_r & mask, bad, row, block, inside, WIDTH,
                )  # fmt: skip
            factor_r = tl.where(mask, factor_r, 0.0)
            if FOLD_RESIDUAL:
                values = add_residual(values, residual, encode_r, factor_r, alpha, SCALED)
            elif PARTS > 0:
                residual = tile_values(residual, encode_r, factor_r)
                residual = scaled(residual, tl.where(mask, unit, 0.0))
                store_values(operand + PLANE * 8, residual, operand_inside, PLANE, PTX)
        if HOT == "fold":
            hot = elements(hot, dtype)
            inverse_there = tl.where((block * 16 < WIDTH)[:, None], hot_inverse, 0.0)[:, :, None]
            folded = ()
            for i in tl.static_range(4):
                # One of the two is 0.
                hot_value = (hot[i] * down) * inverse_there
                folded += (tl.fma(values[i], unit[:, :, None], hot_value),)
            values = folded
        else:
            values = scaled(values, unit)
        if HOT == "part":
            target = operand + (PARTS - 1) * PLANE * 8
            store_values(target, elements(hot, dtype), operand_inside, PLANE, PTX)
        if PARTS > 0:
            store_values(operand, values, operand_inside, PLANE, PTX)
