# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Grouped GEMM of 16-bit activations with NVFP4 weights, for MoE layers and linears."""

import triton
import triton.language as tl

from quads_common.kernels._tiles import tiled_column, tiled_row
from quads_common.kernels._unpack import multiply, unpack_blocks, unpack_words, widen_scale


@triton.jit
def multiply_blocks(
    x_ptr, word_ptr, scale_ptr, acc, row_mask, WORDS: tl.constexpr, PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, FP16: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """acc += x @ w.T over K, without the factor of ``_unpack``. acc: [N, M] if SWAP, else [M, N].

    Pointers [M or N, tile] of the first K tile. WORDS = K / 8. A K tile is 8 products: product j
    takes nibble j of every word and element [.., j, word] of x, so K is summed in that order.
    """
    tile_words: tl.constexpr = BLOCK_K // 8
    tile_blocks: tl.constexpr = BLOCK_K // 16
    word = tl.arange(0, tile_words)[None, :]
    block = tl.arange(0, tile_blocks)[None, :]
    for tile in tl.range(0, tl.cdiv(WORDS, tile_words), num_stages=STAGES):
        if WORDS % tile_words == 0:
            codes = tl.load(word_ptr + tile * tile_words)
            byte = tl.load(scale_ptr + tile * tile_blocks)
        else:
            left = WORDS - tile * tile_words
            codes = tl.load(word_ptr + tile * tile_words, mask=word < left, other=0)
            byte = tl.load(scale_ptr + tile * tile_blocks, mask=block * 2 < left, other=0)
        scale = widen_scale(byte, FP16)
        scale = tl.broadcast_to(scale[:, :, None], (BLOCK_N, tile_blocks, 2))
        scale = scale.reshape(BLOCK_N, tile_words)
        unpacked = unpack_words(codes, FP16)
        for j in tl.static_range(8):
            w = multiply(unpacked[j], scale, FP16)
            x = tl.load(x_ptr + j * PLANE + tile * tile_words, mask=row_mask[:, None], other=0.0)
            # [N, K/8] @ [K/8, M] -> [N, M], or [M, K/8] @ [K/8, N] -> [M, N]
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    return acc


@triton.jit
def multiply_tiles(
    x_ptr, block_ptr, scale_ptr, acc, row_mask, BLOCKS: tl.constexpr, PLANE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, FP16: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """``multiply_blocks`` for tiled weights: the same products, 8 to a K tile.

    block, scale: int64 and byte pointers [N, 1] of the first block of each row of weights; one
    offset serves both, 256 from a weight tile to the next. BLOCKS = K / 16.
    """
    tile_words: tl.constexpr = BLOCK_K // 8
    tile_blocks: tl.constexpr = BLOCK_K // 16
    block = tl.arange(0, tile_blocks)[None, :]
    word = tl.arange(0, tile_words)[None, :]
    offset = tiled_column(block)
    for tile in tl.range(0, tl.cdiv(BLOCKS, tile_blocks), num_stages=STAGES):
        first = tile * (tile_blocks // 8 * 256)
        if BLOCKS % tile_blocks == 0:
            codes = tl.load(block_ptr + (first + offset))
            byte = tl.load(scale_ptr + (first + offset))
        else:
            inside = block < BLOCKS - tile * tile_blocks
            codes = tl.load(block_ptr + (first + offset), mask=inside, other=0)
            byte = tl.load(scale_ptr + (first + offset), mask=inside, other=0)
        products = unpack_blocks(codes, widen_scale(byte, FP16), FP16)
        for j in tl.static_range(8):
            w = tl.join(products[2 * j], products[2 * j + 1]).reshape(BLOCK_N, tile_words)
            x = tl.load(
                x_ptr + word + (j * PLANE + tile * tile_words), mask=row_mask[:, None], other=0.0
            )
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    return acc


@triton.jit(do_not_specialize=["num_slots"])  # changes with the batch
def grouped_gemm_kernel(
    x_ptr, row_scale_ptr, word_ptr, scale_ptr, global_ptr, bias_ptr, router_ptr, y_ptr,
    slots_ptr, experts_ptr, num_slots, n,
    K: tl.constexpr, PLANE: tl.constexpr,
    TOP_K: tl.constexpr, GROUPED: tl.constexpr, HAS_ROW_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr,
    FP16: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, SWAP: tl.constexpr, STAGES: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """y[slot] = (acc * fl32(row_scale * global_scale[e]) [+ bias[e]]) [* router[slot]], rounded.

    acc = x[slot / TOP_K] @ (code * block_scale)[e].T in float32. Grid: (N tiles, M blocks).

    x: [rows, 8, PLANE] fp16 or bf16 operands. row_scale: [rows] float32. word: [E, n, K/8] int32.
    scale: [E, n, K/16] uint8. global: [E] float32. bias: [E, n]. router: [slots]. y: [slots, n].
    slots, experts: tables of ``_route.place_routes``; without GROUPED there is one expert and
    every row is its own slot. TILED: "no", or as ``tiled_row``; then word is int64 [E, n, K/16].
    """
    n_tile = tl.program_id(0)
    m_block = tl.program_id(1)
    if GROUPED:
        expert = tl.load(experts_ptr + m_block).to(tl.int64)
        slot = tl.load(slots_ptr + m_block * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        expert = tl.full((), 0, tl.int64)
        slot = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    if expert < 0:
        return
    row_mask = slot < num_slots
    row = tl.where(row_mask, slot // TOP_K, 0).to(tl.int64)
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of weights beyond n repeat the last one and are not stored.
    column_inside = tl.minimum(column, n - 1)
    word = tl.arange(0, BLOCK_K // 8)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    if TILED == "no":
        weight_row = expert * n + column_inside
        block = tl.arange(0, BLOCK_K // 16)[None, :]
        acc = multiply_blocks(
            x_ptr + row[:, None] * (PLANE * 8) + word,
            word_ptr + weight_row[:, None] * (K // 8) + word,
            scale_ptr + weight_row[:, None] * (K // 16) + block,
            acc, row_mask, K // 8, PLANE, BLOCK_N, BLOCK_K, SWAP, FP16, STAGES,
        )  # fmt: skip
    else:
        first = tiled_row(column_inside, expert, n, K, TILED)[:, None]
        acc = multiply_tiles(
            x_ptr + row[:, None] * (PLANE * 8), word_ptr + first, scale_ptr + first,
            acc, row_mask, K // 16, PLANE, BLOCK_N, BLOCK_K, SWAP, FP16, STAGES,
        )  # fmt: skip
    # Undo the powers of two of ``_unpack``: scaling by them is exact.
    acc = acc * (128.0 if FP16 else 256.0)
    alpha = tl.load(global_ptr + expert)
    if HAS_ROW_SCALE:
        alpha = tl.load(row_scale_ptr + row, mask=row_mask, other=0.0) * alpha
        acc = acc * (alpha[None, :] if SWAP else alpha[:, None])
    else:
        acc = acc * alpha
    column_mask = column < n
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + column, mask=column_mask, other=0.0)
        bias = bias.to(tl.float32)
        acc = acc + (bias[:, None] if SWAP else bias[None, :])
    if HAS_ROUTER:
        router = tl.load(router_ptr + slot, mask=row_mask, other=0.0).to(tl.float32)
        acc = acc * (router[None, :] if SWAP else router[:, None])
    y = acc.to(y_ptr.dtype.element_ty)
    slot = slot.to(tl.int64)
    if SWAP:
        target = y_ptr + slot[None, :] * n + column[:, None]
        tl.store(target, y, mask=row_mask[None, :] & column_mask[:, None])
    else:
        target = y_ptr + slot[:, None] * n + column[None, :]
        tl.store(target, y, mask=row_mask[:, None] & column_mask[None, :])
