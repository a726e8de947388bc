# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""One launch for each part of a unit that arrives: its amax, then its copy or the unit's codes.

The launch of the last part needs the amax of all of it before it may write a code, so its programs
wait for each other: it must be launched as a cooperative grid, all of whose programs run at once.
"""

import triton
import triton.language as tl

from quads_common.kernels._coding import (
    WEIGHT_AMAX_MAX,
    magnitude_bits,
    pack_codes,
    quantize_blocks,
    round_bits_to_bf16,
    weight_global_scale_inv,
)
from quads_common.kernels._tiles import pack_tiled, tiled_column, tiled_row


@triton.jit
def load_blocks(x_ptr, row_stride, first, count, ROW_BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Blocks first.. of a matrix in row-major order, rounded to bfloat16.

    Returns float32 [1, TILE, 16], block numbers [TILE] and which of them are below ``count``.
    """
    block = first + tl.arange(0, TILE)
    inside = block < count
    start = (block // ROW_BLOCKS).to(tl.int64) * row_stride + (block % ROW_BLOCKS) * 16
    pointer = x_ptr + start[None, :, None] + tl.arange(0, 16)[None, None, :]
    x = tl.load(pointer, mask=inside[None, :, None], other=0.0).to(tl.float32)
    if x_ptr.dtype.element_ty != tl.bfloat16:
        x = x.to(tl.bfloat16).to(tl.float32)
    return x, block, inside


@triton.jit
def part_amax(full_ptr, stage_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
              COPY: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """Bits of this program's share of max |full|; with COPY also full itself to [ROWS, WIDTH]."""
    blocks: tl.constexpr = ROWS * WIDTH // 16
    largest = tl.zeros((1, TILE, 16), tl.int32)
    first = tl.program_id(0) * TILE
    for at in tl.range(first, blocks, PROGRAMS * TILE, loop_unroll_factor=4):
        x, block, inside = load_blocks(full_ptr, STRIDE, at, blocks, WIDTH // 16, TILE)
        largest = tl.maximum(largest, magnitude_bits(x))
        if COPY:
            target = stage_ptr + block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
            tl.store(target, x.to(tl.bfloat16), mask=inside[None, :, None])
    return tl.max(tl.ravel(largest), 0)


@triton.jit
def copy_part(shard_ptr, stage_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
              TILE: tl.constexpr, PROGRAMS: tl.constexpr):  # fmt: skip
    """A shard [ROWS, WIDTH] with rows STRIDE apart, to contiguous bfloat16."""
    blocks: tl.constexpr = ROWS * WIDTH // 16
    for at in tl.range(tl.program_id(0) * TILE, blocks, PROGRAMS * TILE):
        x, block, inside = load_blocks(shard_ptr, STRIDE, at, blocks, WIDTH // 16, TILE)
        target = stage_ptr + block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        tl.store(target, x.to(tl.bfloat16), mask=inside[None, :, None])


@triton.jit
def wait_for_all(counter_ptr, PROGRAMS: tl.constexpr):
    """Go on when every program of the grid is here, with what they stored visible.

    counter: int32, increased by PROGRAMS (a power of two, so that overflow does no harm) each time.
    """
    if PROGRAMS > 1:
        tl.debug_barrier()
        before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
        target = (before & -PROGRAMS) + PROGRAMS
        now = before + 1
        while now - target < 0:
            now = tl.atomic_add(counter_ptr, 0, sem="acq_rel", scope="gpu")
        tl.debug_barrier()


@triton.jit
def store_codes(x, inverse, global_scale, packed_ptr, scale_ptr, block, inside, TILE: tl.constexpr,
                ROWS: tl.constexpr, WIDTH: tl.constexpr, TILED: tl.constexpr):  # fmt: skip
    """Quantize blocks [1, TILE, 16] and write them as blocks ``block`` of a unit [ROWS, WIDTH].

    TILED: "no", or the order of rows of ``weight_tiles`` as ``_tiles.tiled_row`` names it.
    """
    _, code, scale = quantize_blocks(x, inverse, global_scale)
    if TILED == "no":
        target = packed_ptr + block[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
        tl.store(target, pack_codes(code, 1, TILE), mask=inside[None, :, None])
    else:
        row, column = block // (WIDTH // 16), block % (WIDTH // 16)
        block = tiled_row(row, 0, ROWS, WIDTH, TILED) + tiled_column(column)
        words = packed_ptr.to(tl.pointer_type(tl.int32))
        target = words + block[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(target, pack_tiled(code.reshape(TILE, 16), TILE), mask=inside[:, None])
    tl.store(scale_ptr + block[None, :], scale.to(tl.uint8), mask=inside[None, :])


@triton.jit
def quantize_unit(
    shard_ptr, stage_ptr, packed_ptr, scale_ptr, inverse, global_scale, first_row,
    PART_ROWS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """Codes of a unit: PART_ROWS rows from ``shard``, those before and behind from the stage."""
    start = tl.program_id(0) * TILE
    first = first_row * (WIDTH // 16)
    part: tl.constexpr = PART_ROWS * WIDTH // 16
    for at in tl.range(start, part, PROGRAMS * TILE):
        x, block, inside = load_blocks(shard_ptr, STRIDE, at, part, WIDTH // 16, TILE)
        store_codes(
            x, inverse, global_scale, packed_ptr, scale_ptr, block + first, inside, TILE,
            ROWS, WIDTH, TILED,
        )  # fmt: skip
    rest: tl.constexpr = (ROWS - PART_ROWS) * WIDTH // 16
    for at in tl.range(start, rest, PROGRAMS * TILE):
        block = at + tl.arange(0, TILE)
        inside = block < rest
        block = tl.where(block < first, block, block + part)
        pointer = stage_ptr + block[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
        x = tl.load(pointer, mask=inside[None, :, None], other=0.0).to(tl.float32)
        store_codes(
            x, inverse, global_scale, packed_ptr, scale_ptr, block, inside, TILE,
            ROWS, WIDTH, TILED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["unit", "mask", "first_row", "row_offset", "block_offset"])
def take_part_kernel(
    full_ptr, stage_ptr, packed_ptr, scale_ptr, global_ptr, amax_ptr, counter_ptr,
    unit, mask, first_row, row_offset, block_offset,
    FULL_ROWS: tl.constexpr, FULL_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    PART_ROWS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    LAST: tl.constexpr, TE_RULE: tl.constexpr, TILE: tl.constexpr, PROGRAMS: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """Take a part of a unit; LAST: quantize the unit too. Grid: (PROGRAMS,), cooperative if LAST.

    full: [FULL_ROWS, FULL_WIDTH], rows STRIDE apart: the unsharded tensor, whose amax counts. Its
    rows row_offset.. and blocks block_offset.. [PART_ROWS, WIDTH] are rows first_row.. of the unit.
    PART_ROWS 0: the caller has put them into the stage. mask: bit p for each part p that it is.
    stage: [ROWS, WIDTH] bfloat16, the parts that came before.
    packed: [U, ROWS, WIDTH/2], scale: [U, ROWS, WIDTH/16] bytes, global: [U] float32.
    amax: int32 [U, PARTS, PROGRAMS], bits of the maxima by part and program. counter: int32 [U].

    TILED: as in ``store_codes``.

    A unit with a part whose amax is above WEIGHT_AMAX_MAX, NaN included, is left as it was.
    """
    unit = unit.to(tl.int64)
    program = tl.program_id(0)
    whole: tl.constexpr = PART_ROWS == FULL_ROWS and WIDTH == FULL_WIDTH
    shard_ptr = full_ptr + row_offset.to(tl.int64) * STRIDE + block_offset * 16
    part_stage_ptr = stage_ptr + first_row * WIDTH
    bits = part_amax(
        full_ptr, part_stage_ptr, FULL_ROWS, FULL_WIDTH, STRIDE, whole and not LAST, TILE, PROGRAMS
    )
    amax_ptr += unit * (PARTS * PROGRAMS)
    for part in tl.static_range(PARTS):
        tl.store(amax_ptr + part * PROGRAMS + program, bits, mask=((mask >> part) & 1) == 1)
    if LAST:
        wait_for_all(counter_ptr + unit, PROGRAMS)
        bits = tl.zeros((PROGRAMS,), tl.int32)
        for part in tl.static_range(PARTS):
            at = amax_ptr + part * PROGRAMS + tl.arange(0, PROGRAMS)
            bits = tl.maximum(bits, tl.load(at, cache_modifier=".cg"))
        amax = round_bits_to_bf16(tl.max(bits, 0))
        if amax <= WEIGHT_AMAX_MAX:
            inverse = weight_global_scale_inv(amax, TE_RULE)
            global_scale = tl.math.div_rn(1.0, inverse)
            if program == 0:
                tl.store(global_ptr + unit, global_scale)
            packed_ptr += unit * (ROWS * WIDTH // 2)
            scale_ptr += unit * (ROWS * WIDTH // 16)
            quantize_unit(
                shard_ptr, stage_ptr, packed_ptr, scale_ptr, inverse, global_scale, first_row,
                PART_ROWS, ROWS, WIDTH, STRIDE, TILE, PROGRAMS, TILED,
            )  # fmt: skip
    elif not whole:
        copy_part(shard_ptr, part_stage_ptr, PART_ROWS, WIDTH, STRIDE, TILE, PROGRAMS)
