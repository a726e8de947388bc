# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Quantizer kernels: amax and codes of weights; rows of activations in one pass."""

import triton
import triton.language as tl

from quads_common.kernels._activation import activate_gated, activate_plain
from quads_common.kernels._coding import (
    INFINITY,
    WEIGHT_AMAX_MAX,
    decode_e4m3,
    magnitude_bits,
    pack_codes,
    quantize_blocks,
    round_bits_to_bf16,
    row_global_scale_inv,
    weight_global_scale_inv,
)
from quads_common.kernels._route import local_expert

E4M3_NAN = tl.constexpr(0x7F)


@triton.jit
def load_weight(x_ptr, stride_row, rows, width, row_tile, column_tile,
                ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """A tile rounded to bfloat16, as float32 [ROWS, BLOCKS, 16], and the mask [ROWS, BLOCKS]."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    block = column_tile * BLOCKS + tl.arange(0, BLOCKS)
    inside = (row < rows)[:, None] & (block * 16 < width)[None, :]
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    offset = row.to(tl.int64)[:, None, None] * stride_row + column[None, :, :]
    x = tl.load(x_ptr + offset, mask=inside[:, :, None], other=0.0).to(tl.float32)
    if x_ptr.dtype.element_ty != tl.bfloat16:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x, row, block, inside


@triton.jit
def weight_amax_kernel(
    x_ptr, amax_ptr, stride_matrix, stride_row, rows, width, column_tiles,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """amax[matrix] = max(amax[matrix], largest |x| rounded to bfloat16). Grid: (tiles, matrices).

    x: [matrices, rows, width]. amax: float32 as int32 bits, so that the maximum of any order is the
    same and NaN wins.
    """
    tile = tl.program_id(0)
    matrix = tl.program_id(1)
    x, _, _, _ = load_weight(
        x_ptr + matrix.to(tl.int64) * stride_matrix, stride_row, rows, width,
        tile // column_tiles, tile % column_tiles, ROWS, BLOCKS,
    )  # fmt: skip
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.ravel(magnitude_bits(x)), 0), sem="relaxed")


@triton.jit
def quantize_weight_kernel(
    x_ptr, amax_ptr, packed_ptr, scale_ptr, global_ptr, flag_ptr,
    stride_matrix, stride_row, packed_matrix, packed_row, scale_matrix, scale_row,
    rows, width, column_tiles,
    TE_RULE: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Quantize [matrices, rows, width] with the given amax [matrices]. Grid: (tiles, matrices).

    A matrix whose amax is negative, NaN or above WEIGHT_AMAX_MAX is left as it was, and its flag
    (int32) is set to 1.
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
        x, row, block, inside = load_weight(
            x_ptr + matrix * stride_matrix, stride_row, rows, width,
            tile // column_tiles, tile % column_tiles, ROWS, BLOCKS,
        )  # fmt: skip
        if tl.max(tl.ravel(magnitude_bits(x)), 0) > WEIGHT_AMAX_MAX:
            tl.store(flag_ptr + matrix, 1)
        _, code, scale = quantize_blocks(x, inverse, global_scale)
        row = row.to(tl.int64)
        byte = (block[:, None] * 8 + tl.arange(0, 8)[None, :])[None, :, :]
        target = packed_ptr + matrix * packed_matrix + row[:, None, None] * packed_row + byte
        tl.store(target, pack_codes(code, ROWS, BLOCKS), mask=inside[:, :, None])
        target = scale_ptr + matrix * scale_matrix + row[:, None] * scale_row + block[None, :]
        tl.store(target, scale.to(tl.uint8), mask=inside)


@triton.jit
def load_rows(
    x_ptr, factor_ptr, stride_row, row, column, inside, width, limit, alpha, beta,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
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
            gate.to(tl.float32), up.to(tl.float32), limit, alpha, beta, ACTIVATION, HAS_LIMIT
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
def store_operand(operand_ptr, value, row, row_inside, PLANE: tl.constexpr,
                  ROWS: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    """Write GEMM operands: element k of a row goes to [row, k % 8, k / 8], zeros up to PLANE."""
    words: tl.constexpr = BLOCKS * 2
    value = value.reshape(ROWS, words, 8).trans(0, 2, 1)
    word = tl.arange(0, words)
    offset = tl.arange(0, 8)[:, None] * PLANE + word[None, :]
    target = operand_ptr + row[:, None, None] * (PLANE * 8) + offset[None, :, :]
    inside = row_inside[:, None, None] & (word < PLANE)[None, None, :]
    tl.store(target, value.to(operand_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "map_size", "num_experts"])
def quantize_rows_kernel(
    x_ptr, factor_ptr, product_ptr, packed_ptr, scale_ptr, global_ptr, operand_ptr,
    ids_ptr, map_ptr, map_size, num_experts,
    rows, width, stride_row, limit, alpha, beta, PLANE: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_FACTOR: tl.constexpr,
    QUANTIZE: tl.constexpr, PRODUCT: tl.constexpr, PACKED: tl.constexpr, OPERAND: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_MAP: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    NEXT_MAY_START: tl.constexpr,
):  # fmt: skip
    """Activation, quantization and reordering of rows, each part optional. Grid: (row tiles,).

    x: [rows, width] (2 * width if gated), any model dtype. Outputs, all [rows, ...]: product
    [width] in x's dtype, packed [width/2], scale [width/16] bytes, global [1] float32, operand
    [8, PLANE] 16-bit: code * block scale, or x itself without QUANTIZE. Rows of skipped slots are
    left alone. A row with NaN or Inf gets codes 0, scales NaN and operands NaN.
    """
    if NEXT_MAY_START:  # it waits for the results itself (sm_90)
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_inside = row < rows
    if HAS_IDS:
        ids = tl.load(ids_ptr + row, mask=row_inside, other=-1)
        row_inside = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP) >= 0
    row = tl.where(row_inside, row, 0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = row_inside[:, None] & (block * 16 < width)[None, :]
    x = load_rows(
        x_ptr, factor_ptr, stride_row, row, column[None, :, :], inside[:, :, None], width, limit,
        alpha, beta, ACTIVATION, HAS_LIMIT, HAS_FACTOR,
    )  # fmt: skip
    if PRODUCT:
        target = product_ptr + row[:, None, None] * width + column[None, :, :]
        tl.store(target, x.to(product_ptr.dtype.element_ty), mask=inside[:, :, None])
    if QUANTIZE:
        amax = tl.max(tl.max(magnitude_bits(x), 2), 1)
        bad = amax >= INFINITY
        inverse = row_global_scale_inv(tl.where(bad, 0, amax))
        global_scale = tl.math.div_rn(1.0, inverse)
        tl.store(global_ptr + row, tl.where(bad, float("nan"), global_scale), mask=row_inside)
        x = tl.where(bad[:, None, None], 0.0, x)
        value, code, scale = quantize_blocks(x, inverse[:, None], global_scale[:, None])
        if PACKED:
            byte = block[:, None] * 8 + tl.arange(0, 8)[None, :]
            target = packed_ptr + row[:, None, None] * (width // 2) + byte[None, :, :]
            tl.store(target, pack_codes(code, ROWS, BLOCKS), mask=inside[:, :, None])
            target = scale_ptr + row[:, None] * (width // 16) + block[None, :]
            byte = tl.where(bad[:, None], E4M3_NAN, scale).to(tl.uint8)
            tl.store(target, byte, mask=inside)
        x = value * decode_e4m3(scale)[:, :, None]
        x = tl.where(bad[:, None, None], float("nan"), x)
    if OPERAND:
        x = tl.where((block * 16 < width)[None, :, None], x, 0.0)
        store_operand(operand_ptr, x, row, row_inside, PLANE, ROWS, BLOCKS)
