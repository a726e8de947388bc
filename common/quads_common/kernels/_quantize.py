# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Quantizer kernels: amax and codes of weights; rows of activations in one pass."""

import triton
import triton.language as tl

from quads_common.kernels._activation import activate_gated, activate_plain
from quads_common.kernels._blocks import (
    HIGH,
    block_amax_bits,
    code_word,
    elements,
    hold,
    load_block,
    load_interleaved,
    quantized_pairs,
    store_block,
    store_codes,
    store_pairs,
)
from quads_common.kernels._coding import (
    INFINITY,
    WEIGHT_AMAX_MAX,
    as_float,
    block_scales,
    decode_e4m3,
    magnitude_bits,
    round_bits_to_bf16,
    row_global_scale_inv,
    weight_global_scale_inv,
)
from quads_common.kernels._route import local_expert

E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def load_weight(x_ptr, stride_row, row, block, inside, WIDE: tl.constexpr, PTX: tl.constexpr):
    """A tile of ``_blocks`` rounded to bfloat16, as its elements."""
    pointer = x_ptr + (row.to(tl.int64)[None, :] * stride_row + block[:, None] * 16)
    x = elements(load_block(pointer, inside, WIDE), x_ptr.dtype.element_ty)
    if x_ptr.dtype.element_ty != tl.bfloat16:
        x = elements(hold(x, tl.bfloat16, PTX), tl.bfloat16)
    return x


@triton.jit
def weight_tile(tile, column_tiles, chunk, rows, width, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
                CHUNKS: tl.constexpr):  # fmt: skip
    """Rows [ROWS] and blocks [BLOCKS] of one of a program's tiles, and which are there [B, R]."""
    row = ((tile // column_tiles) * CHUNKS + chunk) * ROWS + tl.arange(0, ROWS)
    block = (tile % column_tiles) * BLOCKS + tl.arange(0, BLOCKS)
    return row, block, (row < rows)[None, :] & (block * 16 < width)[:, None]


@triton.jit
def weight_amax_kernel(
    x_ptr, amax_ptr, stride_matrix, stride_row, rows, width, column_tiles,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """amax[matrix] = max(amax[matrix], largest |x| rounded to bfloat16). Grid: (tiles, matrices).

    x: [matrices, rows, width]. amax: float32 as int32 bits, so that the maximum of any order is the
    same and NaN wins. WIDE: x and its strides are multiples of 16 bytes.
    """
    tile = tl.program_id(0)
    matrix = tl.program_id(1)
    x_ptr += matrix.to(tl.int64) * stride_matrix
    largest = tl.zeros((BLOCKS, ROWS), tl.int32)
    for chunk in tl.static_range(CHUNKS):
        row, block, inside = weight_tile(
            tile, column_tiles, chunk, rows, width, ROWS, BLOCKS, CHUNKS
        )
        x = load_weight(x_ptr, stride_row, row, block, inside, WIDE, PTX)
        largest = tl.maximum(largest, block_amax_bits(x))
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.ravel(largest), 0), sem="relaxed")


@triton.jit
def quantize_weight_kernel(
    x_ptr, amax_ptr, packed_ptr, scale_ptr, global_ptr, flag_ptr,
    stride_matrix, stride_row, packed_matrix, packed_row, scale_matrix, scale_row,
    rows, width, column_tiles,
    TE_RULE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Quantize [matrices, rows, width] with the given amax [matrices]. Grid: (tiles, matrices).

    A matrix whose amax is negative, NaN or above WEIGHT_AMAX_MAX is left as it was, and its flag
    (int32) is set to 1. WIDE: x and its strides are multiples of 16 bytes, packed of 8.
    """
    tile = tl.program_id(0)
    matrix = tl.program_id(1).to(tl.int64)
    given = tl.load(amax_ptr + matrix)
    amax = round_bits_to_bf16(magnitude_bits(given))
    if (amax > WEIGHT_AMAX_MAX) | (given < 0.0):
        if tile == 0:
            tl.store(flag_ptr + matrix, 1)
    else:
        inverse = weight_global_scale_inv(amax, TE_RULE)
        global_scale = tl.math.div_rn(1.0, inverse)
        if tile == 0:
            tl.store(global_ptr + matrix, global_scale)
        x_ptr += matrix * stride_matrix
        packed_ptr += matrix * packed_matrix
        scale_ptr += matrix * scale_matrix
        for chunk in tl.static_range(CHUNKS):
            row, block, inside = weight_tile(
                tile, column_tiles, chunk, rows, width, ROWS, BLOCKS, CHUNKS
            )
            x = load_weight(x_ptr, stride_row, row, block, inside, WIDE, PTX)
            bits = block_amax_bits(x)
            flag = tl.full((BLOCKS, ROWS), 1, tl.int32)
            at = flag_ptr + (matrix + tl.zeros((BLOCKS, ROWS), tl.int32))
            tl.store(at, flag, mask=bits > WEIGHT_AMAX_MAX)
            scale, encode, live = block_scales(as_float(bits), inverse, global_scale)
            first = tl.where(live, code_word(x[0], x[1], encode), 0)
            second = tl.where(live, code_word(x[2], x[3], encode), 0)
            row = row.to(tl.int64)[None, :]
            target = packed_ptr + (row * packed_row + block[:, None] * 8)
            store_codes(target, first, second, inside, WIDE)
            target = scale_ptr + (row * scale_row + block[:, None])
            tl.store(target, scale.to(tl.uint8), mask=inside)


@triton.jit
def load_rows(
    x_ptr, factor_ptr, stride_row, row, column, inside, width, limit, alpha, beta,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    PTX: tl.constexpr = False,
):  # fmt: skip
    """Rows, or the activation of rows, rounded to the input's dtype: float32 [ROWS, BLOCKS, 16].

    row: [ROWS] int64. column: of the result, [1 or ROWS, BLOCKS, 16]. inside: [ROWS, BLOCKS, 1].
    """
    base = x_ptr + row[:, None, None] * stride_row
    at = column
    if ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        if ACTIVATION == "silu":
            gate = tl.load(base + at, mask=inside, other=0.0)
            up = tl.load(base + width + at, mask=inside, other=0.0)
        else:
            gate = tl.load(base + 2 * at, mask=inside, other=0.0)
            up = tl.load(base + 2 * at + 1, mask=inside, other=0.0)
        x = activate_gated(
            gate.to(tl.float32), up.to(tl.float32), limit, alpha, beta, ACTIVATION, HAS_LIMIT, PTX
        )
    else:
        x = tl.load(base + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_FACTOR:
            x = x * tl.load(factor_ptr + row).to(tl.float32)[:, None, None]
        if ACTIVATION != "none":
            x = activate_plain(x, ACTIVATION)
    # Beyond the row an activation such as 0 * sigmoid(0) is 0 too, so padding never counts.
    return x.to(x_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def load_activations(
    x_ptr, factor_ptr, stride_row, row, block, inside, limit, alpha, beta, WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    WIDE: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """``load_rows`` as a tile of ``_blocks``. inside: [B, R]."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    pointer = x_ptr + (row[None, :] * stride_row + block[:, None] * 16)
    if not WIDE or (ACTIVATION == "swigluoai" and dtype == tl.float32):
        x = ()
        for i in tl.static_range(4):
            column = block[:, None] * 16 + (tl.arange(0, 4) * 2 + (i // 2 * 8 + i % 2))[None, :]
            part = load_rows(
                x_ptr, factor_ptr, stride_row, row, column[None, :, :],
                tl.trans(inside)[:, :, None], WIDTH, limit, alpha, beta, ACTIVATION, HAS_LIMIT,
                HAS_FACTOR, PTX,
            )  # fmt: skip
            x += (tl.permute(part, (1, 0, 2)),)
        result = hold(x, dtype, False)
    elif ACTIVATION == "silu" or ACTIVATION == "swigluoai":
        if ACTIVATION == "silu":
            gate = elements(load_block(pointer, inside, True), dtype)
            up = elements(load_block(pointer + WIDTH, inside, True), dtype)
        else:
            gate, up = load_interleaved(pointer + block[:, None] * 16, inside)
        x = ()
        for i in tl.static_range(4):
            x += (activate_gated(gate[i], up[i], limit, alpha, beta, ACTIVATION, HAS_LIMIT, PTX),)
        result = hold(x, dtype, PTX)
    else:
        result = load_block(pointer, inside, True)
        if HAS_FACTOR:
            factor = tl.load(factor_ptr + row).to(tl.float32)[None, :, None]
        if HAS_FACTOR or ACTIVATION != "none":
            source = elements(result, dtype)
            x = ()
            for i in tl.static_range(4):
                part = source[i] * factor if HAS_FACTOR else source[i]
                x += (activate_plain(part, ACTIVATION) if ACTIVATION != "none" else part,)
            result = hold(x, dtype, PTX)
    return result


@triton.jit(do_not_specialize=["rows", "map_size", "num_experts"])
def quantize_rows_kernel(
    x_ptr, factor_ptr, product_ptr, packed_ptr, scale_ptr, global_ptr, operand_ptr,
    ids_ptr, map_ptr, map_size, num_experts, rows, stride_row, limit, alpha, beta,
    WIDTH: tl.constexpr, PLANE: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    QUANTIZE: tl.constexpr, PRODUCT: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr, WIDE: tl.constexpr, PTX: tl.constexpr, NEXT_MAY_START: tl.constexpr,
):  # fmt: skip
    """Activation, quantization and reordering of rows, each part optional. Grid: (row tiles,).

    x: [rows, WIDTH] (2 * WIDTH if gated), any model dtype. Outputs, all [rows, ...]: product
    [WIDTH] in x's dtype, packed [WIDTH/2], scale [WIDTH/16] bytes, global [1] float32, operand
    [8, PLANE] 16-bit: code * block scale, or x itself without QUANTIZE. Rows of skipped slots are
    left alone. A row with NaN or Inf gets codes 0, scales NaN and operands NaN.

    A row is CHUNKS tiles of BLOCKS blocks, all in registers before its global scale is known.
    WIDE: x, its rows and the columns of up start at multiples of 16 bytes. PTX: see ``_blocks``.
    """
    if NEXT_MAY_START:  # it waits for the results itself (sm_90)
        tl.extra.cuda.gdc_launch_dependents()
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    if HAS_IDS:
        ids = tl.load(ids_ptr + row, mask=row_inside, other=-1)
        row_inside = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP) >= 0
    row = tl.where(row_inside, row, 0).to(tl.int64)
    blocks = ()
    amaxes = ()
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        inside = row_inside[None, :] & (block * 16 < WIDTH)[:, None]
        x = load_activations(
            x_ptr, factor_ptr, stride_row, row, block, inside, limit, alpha, beta, WIDTH,
            ACTIVATION, HAS_LIMIT, HAS_FACTOR, WIDE, PTX,
        )  # fmt: skip
        if PRODUCT:
            target = product_ptr + (row[None, :] * WIDTH + block[:, None] * 16)
            store_block(target, elements(x, dtype), inside)
        blocks += (x,)
        if QUANTIZE:
            amaxes += (block_amax_bits(elements(x, dtype)),)
    if QUANTIZE:
        amax = amaxes[0]
        for chunk in tl.static_range(1, CHUNKS):
            amax = tl.maximum(amax, amaxes[chunk])
        amax = tl.max(amax, 0)
        bad = amax >= INFINITY
        inverse = row_global_scale_inv(tl.where(bad, 0, amax))
        global_scale = tl.math.div_rn(1.0, inverse)
        tl.store(global_ptr + row, tl.where(bad, float("nan"), global_scale), mask=row_inside)
        inverse, global_scale, bad = inverse[None, :], global_scale[None, :], bad[None, :]
    for chunk in tl.static_range(CHUNKS):
        block = chunk * BLOCKS + tl.arange(0, BLOCKS)
        block_inside = (block * 16 < WIDTH)[:, None]
        if QUANTIZE:
            x = elements(blocks[chunk], dtype)
            scale, encode, live = block_scales(as_float(amaxes[chunk]), inverse, global_scale)
        if PACKED:
            live = live & (bad == 0)
            first = tl.where(live, code_word(x[0], x[1], encode), 0)
            second = tl.where(live, code_word(x[2], x[3], encode), 0)
            inside = row_inside[None, :] & block_inside
            target = packed_ptr + (row[None, :] * (WIDTH // 2) + block[:, None] * 8)
            store_codes(target, first, second, inside, True)
            target = scale_ptr + (row[None, :] * (WIDTH // 16) + block[:, None])
            tl.store(target, tl.where(bad, E4M3_NAN, scale).to(tl.uint8), mask=inside)
        if OPERAND:
            if QUANTIZE:
                # 6 * 2^-126, that of code 7, becomes the bits of float16's NaN.
                factor = tl.where(bad, 268435456.0, decode_e4m3(scale) * 16384.0)
                factor = tl.where(block_inside, factor, 0.0)
                encode = tl.where(bad, float("nan"), encode)
                even = quantized_pairs(x[0], x[2], encode, factor)
                odd = quantized_pairs(x[1], x[3], encode, factor)
            else:
                first, second = blocks[chunk]
                even = (first & 0xFFFF) | (second << 16)
                odd = ((first >> 16) & 0xFFFF) | (second & HIGH)
            inside = row_inside[None, :] & (block * 2 < PLANE)[:, None]
            target = operand_ptr + (row[None, :] * (PLANE * 8) + block[:, None] * 2)
            store_pairs(target, even, odd, inside, PLANE)
