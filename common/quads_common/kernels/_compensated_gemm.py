# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Grouped GEMM of compensated activations: several products with one unpacked weight tile.

The parts of an operand stand beside each other as rows of one product, so every weight is loaded
and unpacked once; each part has accumulators of its own. BF16 columns are a second, thin loop over
the hot channels into the scaled accumulator.
"""

import triton
import triton.language as tl

from quads_common.kernels._gemm import multiply_blocks, multiply_tiles
from quads_common.kernels._tiles import bf16_column, tiled_row


@triton.jit
def pick_part(acc, part: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
              PARTS: tl.constexpr):  # fmt: skip
    """acc [BLOCK_N, PARTS * BLOCK_M] of one part: [BLOCK_N, BLOCK_M]. Adds zeros only."""
    mine = tl.arange(0, PARTS)[None, :, None] == part
    return tl.sum(tl.where(mine, acc.reshape(BLOCK_N, PARTS, BLOCK_M), 0.0), 1)


@triton.jit(do_not_specialize=["num_slots"])
def compensated_gemm_kernel(
    x_ptr, row_scale_ptr, hot_ptr, word_ptr, scale_ptr, global_ptr, column_ptr, bias_ptr,
    router_ptr, y_ptr, slots_ptr, experts_ptr, num_slots, n, rac_alpha,
    K: tl.constexpr, PLANE: tl.constexpr, STORED: tl.constexpr, PARTS: tl.constexpr,
    RAC: tl.constexpr, HOT: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_C: tl.constexpr,
    TOP_K: tl.constexpr, GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ROUTER: tl.constexpr,
    FP16: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """y[slot] = (``operands.product`` [+ bias[e]]) [* router[slot]], rounded. Grid: (N, M tiles).

    x: [rows, STORED, 8, PLANE], part 0 code * block scale, then with RAC the residual's, last with
    HOT the hot values; PARTS: STORED as a power of two. hot: [rows, CHANNELS] bf16 and column:
    [E, n, CHANNELS] bf16, TILED as the weight, where CHANNELS is not 0. The rest as in
    ``_gemm.grouped_gemm_kernel``.
    """
    n_tile = tl.program_id(0)
    m_block = tl.program_id(1)
    place = tl.arange(0, PARTS * BLOCK_M)
    lane = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    lane_of_part = m_block * BLOCK_M + place % BLOCK_M
    if GROUPED:
        expert = tl.load(experts_ptr + m_block).to(tl.int64)
        slot = tl.load(slots_ptr + lane)
        slot_of_part = tl.load(slots_ptr + lane_of_part)
    else:
        expert = tl.full((), 0, tl.int64)
        slot = lane
        slot_of_part = lane_of_part
    if expert < 0:
        return
    row_mask = slot < num_slots
    row = tl.where(row_mask, slot // TOP_K, 0).to(tl.int64)
    part = place // BLOCK_M
    part_mask = (slot_of_part < num_slots) & (part < STORED)
    part_row = tl.where(part_mask, slot_of_part // TOP_K * STORED + part, 0).to(tl.int64)
    column = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = expert * n + tl.minimum(column, n - 1)
    both = tl.zeros((BLOCK_N, PARTS * BLOCK_M), tl.float32)
    if TILED == "no":
        word = tl.arange(0, BLOCK_K // 8)[None, :]
        block = tl.arange(0, BLOCK_K // 16)[None, :]
        both = multiply_blocks(
            x_ptr + part_row[:, None] * (PLANE * 8) + word,
            word_ptr + weight_row[:, None] * (K // 8) + word,
            scale_ptr + weight_row[:, None] * (K // 16) + block,
            both, part_mask, K // 8, PLANE, BLOCK_N, BLOCK_K, True, FP16, STAGES,
        )  # fmt: skip
    else:
        first = tiled_row(tl.minimum(column, n - 1), expert, n, K, TILED)[:, None]
        both = multiply_tiles(
            x_ptr + part_row[:, None] * (PLANE * 8), word_ptr + first, scale_ptr + first,
            both, part_mask, K // 16, PLANE, BLOCK_N, BLOCK_K, True, FP16, STAGES,
        )  # fmt: skip
    # Undo the powers of two of ``_unpack``: scaling by them is exact.
    both = both * (128.0 if FP16 else 256.0)
    acc = both
    if PARTS > 1:
        acc = pick_part(both, 0, BLOCK_N, BLOCK_M, PARTS)
    if RAC:
        acc = acc + rac_alpha * pick_part(both, 1, BLOCK_N, BLOCK_M, PARTS)
    alpha = tl.load(global_ptr + expert)
    row_scale = tl.load(row_scale_ptr + row, mask=row_mask, other=0.0)
    if HOT:
        hot = pick_part(both, STORED - 1, BLOCK_N, BLOCK_M, PARTS)
        acc = alpha * (row_scale[None, :] * acc + hot)
    else:
        acc = acc * (row_scale * alpha)[None, :]
    if CHANNELS > 0:
        weight_row = tl.minimum(column, n - 1)[:, None]
        for start in range(0, CHANNELS, BLOCK_C):
            channel = (start + tl.arange(0, BLOCK_C))[None, :]
            inside = channel < CHANNELS
            offset = bf16_column(weight_row, channel, expert, n, CHANNELS, TILED)
            w = tl.load(column_ptr + offset, mask=inside, other=0)
            x = tl.load(
                hot_ptr + row[:, None] * CHANNELS + channel,
                mask=row_mask[:, None] & inside,
                other=0,
            )
            acc = tl.dot(w, x.T, acc)  # [N, C] @ [C, M]
    column_mask = column < n
    if HAS_BIAS:
        bias = tl.load(bias_ptr + expert * n + column, mask=column_mask, other=0.0)
        acc = acc + bias.to(tl.float32)[:, None]
    if HAS_ROUTER:
        router = tl.load(router_ptr + slot, mask=row_mask, other=0.0).to(tl.float32)
        acc = acc * router[None, :]
    target = y_ptr + slot.to(tl.int64)[None, :] * n + column[:, None]
    mask = row_mask[None, :] & column_mask[:, None]
    tl.store(target, acc.to(y_ptr.dtype.element_ty), mask=mask)
