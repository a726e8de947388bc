# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Grouped GEMM on FP4 tensor cores: packed activations times packed weights, block scales of both.

Weights are the left operand, 128 rows of a program, and tokens the right one: sm_100 and sm_103
have no FP4 instruction for fewer rows on the left, and a decode batch has few tokens. RAC's
residual is a second set of columns of the right operand, so that one instruction multiplies both
with a tile of weights; splice is a product of its own.
"""

import triton
import triton.language as tl

from quads_common.kernels.blackwell._splice import multiply_hot

BLOCK_N = tl.constexpr(128)
# Rows that the epilogue handles at once; it would spill with more.
MAX_FINISHED = tl.constexpr(32)


@triton.jit
def multiply_tiles(
    acc, w_ptr, w_scale_ptr, x_ptr, x_scale_ptr, row_mask, first, last,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc += w @ x.T over the K tiles [first, last).

    Pointers [rows, bytes] and [rows, scales] of K tile 0. acc: [BLOCK_N, columns] float32.
    """
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    block = tl.arange(0, BLOCK_K // 16)[None, :]
    for tile in tl.range(first, last, num_stages=STAGES):
        at = tile * (BLOCK_K // 2)
        scale_at = tile * (BLOCK_K // 16)
        if K % BLOCK_K == 0:
            w = tl.load(w_ptr + at)
            w_scale = tl.load(w_scale_ptr + scale_at)
            x_mask = row_mask[:, None]
            x_scale_mask = row_mask[:, None]
        else:
            byte_mask = at + byte < K // 2
            block_mask = scale_at + block < K // 16
            w = tl.load(w_ptr + at, mask=byte_mask, other=0)
            w_scale = tl.load(w_scale_ptr + scale_at, mask=block_mask, other=0.0)
            x_mask = row_mask[:, None] & byte_mask
            x_scale_mask = row_mask[:, None] & block_mask
        x = tl.load(x_ptr + at, mask=x_mask, other=0)
        x_scale = tl.load(x_scale_ptr + scale_at, mask=x_scale_mask, other=0.0)
        # [N, K] @ [K, M] -> [N, M]
        acc = tl.dot_scaled(w, w_scale, "e2m1", x.T, x_scale, "e2m1", acc)
    return acc


@triton.jit
def block_end(mask_ptr, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """One more than the last selected block; 0 if there is none. mask: [BLOCKS] bool."""
    block = tl.arange(0, PADDED)
    chosen = tl.load(mask_ptr + block, mask=block < BLOCKS, other=0) != 0
    return tl.max(tl.where(chosen, block + 1, 0), 0)


@triton.jit
def halves(acc, HALF: tl.constexpr):
    """[BLOCK_N, 2 * HALF] to two of [BLOCK_N, HALF]."""
    return acc.reshape(BLOCK_N, 2, HALF).trans(0, 2, 1).split()


@triton.jit
def finish(
    acc, acc_hot, slot, column, num_slots, n, expert, row_scale_ptr, global_ptr, bias_ptr,
    router_ptr, y_ptr, TOP_K: tl.constexpr, HOT: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_ROUTER: tl.constexpr,
):  # fmt: skip
    """Scale, add, round and store some rows of a tile: the end of ``operands.product``, and on.

    acc, acc_hot: [BLOCK_N, rows] float32. slot: [rows]. column: [BLOCK_N].
    """
    row_mask = slot < num_slots
    row = tl.where(row_mask, slot // TOP_K, 0).to(tl.int64)
    row_scale = tl.load(row_scale_ptr + row, mask=row_mask, other=0.0)
    global_scale = tl.load(global_ptr + expert)
    if HOT == "dequant":
        acc = global_scale * (acc * row_scale[None, :] + acc_hot)
    else:
        acc = acc * (row_scale * global_scale)[None, :]
        if HOT == "bf16":
            acc = acc + acc_hot
    column_mask = column < n
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + column, mask=column_mask, other=0.0)
        acc = acc + bias.to(tl.float32)[:, None]
    if HAS_ROUTER:
        router = tl.load(router_ptr + slot, mask=row_mask, other=0.0).to(tl.float32)
        acc = acc * router[None, :]
    target = y_ptr + slot.to(tl.int64)[None, :] * n + column[:, None]
    inside = row_mask[None, :] & column_mask[:, None]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def slots_of(slots_ptr, place, GROUPED: tl.constexpr):
    """The slots at places of the routing table, or the places themselves."""
    return tl.load(slots_ptr + place) if GROUPED else place


@triton.jit(do_not_specialize=["num_rows", "num_slots", "alpha"])  # change with the batch
def grouped_fp4_kernel(
    x_ptr, x_scale_ptr, row_scale_ptr, hot_ptr, w_ptr, w_scale_ptr, global_ptr,
    mask_ptr, channels_ptr, columns_ptr, bias_ptr, router_ptr, y_ptr, slots_ptr, experts_ptr,
    num_rows, num_slots, n, alpha,
    K: tl.constexpr, CHANNELS: tl.constexpr, TOP_K: tl.constexpr, GROUPED: tl.constexpr,
    MANY_MASKS: tl.constexpr, MANY_LISTS: tl.constexpr, RESIDUAL: tl.constexpr, HOT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr, PADDED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[slot] = (product [+ bias[e]]) [* router[slot]], rounded once. Grid: (N tiles, M blocks).

    product: that of ``compensation.operands``, float32; rows of activations are slot / TOP_K.

    x: [1 or 2, num_rows, K/2] uint8 and x_scale: [.., num_rows, K/16] E4M3, codes of the
    activations and, with RESIDUAL, of their residual, which is 0 outside the selected blocks.
    row_scale: [num_rows] float32. hot: [num_rows, CHANNELS] bf16. w: [E, n, K/2] uint8. w_scale:
    [E, n, K/16] E4M3. global: [E] float32. mask: [L, K/16] bool selected blocks, channels: [L,
    CHANNELS] int32, -1 for none; one list, or one per expert if there are MANY. columns: [E, n,
    CHANNELS] bf16. bias: [E, n]. router: [slots].
    HOT: "none", "dequant" (columns of w) or "bf16" (columns). PADDED: power of two from K/16 on.
    slots, experts: tables of ``_route.place_routes``; without GROUPED there is one expert and
    every row is its own slot.
    """
    m_block = tl.program_id(1)
    expert = tl.full((), 0, tl.int64)
    if GROUPED:
        expert = tl.load(experts_ptr + m_block).to(tl.int64)
    if expert < 0:
        return
    slot = slots_of(slots_ptr, m_block * BLOCK_M + tl.arange(0, BLOCK_M), GROUPED)
    row_mask = slot < num_slots
    row = tl.where(row_mask, slot // TOP_K, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows of weights beyond n repeat the last one and are not stored.
    weight_row = expert * n + tl.minimum(column, n - 1)
    byte = tl.arange(0, BLOCK_K // 2)[None, :]
    block = tl.arange(0, BLOCK_K // 16)[None, :]
    w_at = w_ptr + weight_row[:, None] * (K // 2) + byte
    w_scale_at = w_scale_ptr + weight_row[:, None] * (K // 16) + block
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    tile = 0
    if RESIDUAL:
        # Beyond the last selected block the residual is 0: with selected blocks first, most of K.
        mask_ptr += (expert if MANY_MASKS else 0) * (K // 16)
        tile = tl.cdiv(block_end(mask_ptr, K // 16, PADDED), BLOCK_K // 16)
        place = tl.arange(0, 2 * BLOCK_M)
        slot2 = slots_of(slots_ptr, m_block * BLOCK_M + place % BLOCK_M, GROUPED)
        mask2 = slot2 < num_slots
        row2 = tl.where(mask2, slot2 // TOP_K, 0).to(tl.int64) + place // BLOCK_M * num_rows
        both = multiply_tiles(
            tl.zeros((BLOCK_N, 2 * BLOCK_M), tl.float32), w_at, w_scale_at,
            x_ptr + row2[:, None] * (K // 2) + byte,
            x_scale_ptr + row2[:, None] * (K // 16) + block,
            mask2, 0, tile, K, BLOCK_K, STAGES,
        )  # fmt: skip
        acc, rest = halves(both, BLOCK_M)
        acc = acc + alpha * rest
    acc = multiply_tiles(
        acc, w_at, w_scale_at, x_ptr + row[:, None] * (K // 2) + byte,
        x_scale_ptr + row[:, None] * (K // 16) + block,
        row_mask, tile, tl.cdiv(K, BLOCK_K), K, BLOCK_K, STAGES,
    )  # fmt: skip
    acc_hot = acc
    if HOT != "none":
        acc_hot = multiply_hot(
            hot_ptr, channels_ptr + (expert if MANY_LISTS else 0) * CHANNELS, columns_ptr, w_ptr,
            w_scale_ptr, row, row_mask, weight_row, K, CHANNELS, HOT == "bf16", BLOCK_N, BLOCK_M,
            BLOCK_C,
        )  # fmt: skip
    if BLOCK_M <= MAX_FINISHED:
        finish(
            acc, acc_hot, slot, column, num_slots, n, expert, row_scale_ptr, global_ptr, bias_ptr,
            router_ptr, y_ptr, TOP_K, HOT, HAS_BIAS, HAS_ROUTER,
        )  # fmt: skip
    else:
        HALF: tl.constexpr = BLOCK_M // 2
        acc = halves(acc, HALF)
        acc_hot = halves(acc_hot, HALF)
        for i in tl.static_range(2):
            place = m_block * BLOCK_M + i * HALF + tl.arange(0, HALF)
            finish(
                acc[i], acc_hot[i], slots_of(slots_ptr, place, GROUPED), column, num_slots, n,
                expert, row_scale_ptr, global_ptr, bias_ptr, router_ptr, y_ptr, TOP_K, HOT,
                HAS_BIAS, HAS_ROUTER,
            )  # fmt: skip
