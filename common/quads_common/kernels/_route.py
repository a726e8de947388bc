# mypy: ignore-errors
# Device code: what stands here is Triton's language, not Python's.
"""Sort the slots of a batch by expert, each expert's padded to whole blocks of GEMM rows.

A slot is one (token, k) entry of the router's choice, numbered token * top_k + k. The order within
an expert is that of the slots: no atomics, the same tables in every run.
"""

import triton
import triton.language as tl

# Integers that change with the batch: compiled once for all of their values.
BATCH_ARGUMENTS = ["num_slots", "map_size", "num_experts"]


@triton.jit
def local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP: tl.constexpr):
    """Router's expert ids to this rank's; -1 for skipped slots and other ranks' experts."""
    # Ids of 64 bits are compared as they are: cut to 32, 2^32 would name expert 0.
    if ids.dtype.primitive_bitwidth <= 32:
        ids = ids.to(tl.int32)
    if HAS_MAP:
        known = (ids >= 0) & (ids < map_size)
        ids = tl.load(map_ptr + tl.where(known, ids, 0), mask=known, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def count_chunk(
    ids_ptr, num_slots, map_ptr, map_size, num_experts, chunk,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """How many slots of a chunk go to each expert: int32 [BINS]; bin num_experts is the rest."""
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    expert = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP)
    return tl.histogram(tl.where(expert < 0, num_experts, expert), BINS)


@triton.jit(do_not_specialize=BATCH_ARGUMENTS)
def count_routes(
    ids_ptr, counts_ptr, num_slots, map_ptr, map_size, num_experts,
    HAS_MAP: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """counts[chunk, expert] int32 [chunks, BINS]. Grid: (chunks,)."""
    chunk = tl.program_id(0)
    counts = count_chunk(
        ids_ptr, num_slots, map_ptr, map_size, num_experts, chunk, HAS_MAP, CHUNK, BINS
    )
    tl.store(counts_ptr + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=[*BATCH_ARGUMENTS, "chunks", "max_blocks"])
def place_routes(
    ids_ptr, counts_ptr, slots_ptr, experts_ptr,
    num_slots, map_ptr, map_size, num_experts, chunks, max_blocks,
    HAS_MAP: tl.constexpr, ONE_CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Write the slots that one chunk sends to one expert. Grid: (num_experts, chunks).

    slots: int32 [max_blocks * BLOCK_M], padding holds num_slots.
    experts: int32 [max_blocks], the expert of each block, -1 behind the last.
    """
    expert = tl.program_id(0)
    chunk = tl.program_id(1)
    bins = tl.arange(0, BINS)
    if ONE_CHUNK:
        total = count_chunk(
            ids_ptr, num_slots, map_ptr, map_size, num_experts, 0, HAS_MAP, CHUNK, BINS
        )
        before = 0
    else:
        total = tl.zeros((BINS,), tl.int32)
        before = 0
        for other in range(chunks):
            row = tl.load(counts_ptr + other * BINS + bins)
            total += row
            before += tl.where(other < chunk, tl.sum(tl.where(bins == expert, row, 0)), 0)
    blocks = tl.where(bins < num_experts, (total + (BLOCK_M - 1)) // BLOCK_M, 0)
    first_block = tl.sum(tl.where(bins < expert, blocks, 0))
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
    mine = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP) == expert
    place = first_block * BLOCK_M + before + tl.cumsum(mine.to(tl.int32)) - 1
    tl.store(slots_ptr + place, slots, mask=mine)
    if chunk == 0:
        count = tl.sum(tl.where(bins == expert, total, 0))
        end_block = first_block + tl.sum(tl.where(bins == expert, blocks, 0))
        padding = first_block * BLOCK_M + count + tl.arange(0, BLOCK_M)
        tl.store(slots_ptr + padding, num_slots, mask=padding < end_block * BLOCK_M)
        for block in range(first_block, end_block):
            tl.store(experts_ptr + block, expert)
        for block in range(tl.sum(blocks) + expert, max_blocks, num_experts):
            tl.store(experts_ptr + block, -1)


@triton.jit(do_not_specialize=BATCH_ARGUMENTS[1:])
def sum_slots(
    slots_ptr, ids_ptr, out_ptr, width, map_ptr, map_size, num_experts,
    HAS_MAP: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of slots[t, k] over k, in slot order, rounded once. Grid: (tokens, tiles).

    slots: [tokens * TOP_K, width] float32; skipped slots are not read. out: [tokens, width].
    EARLY: launched before the kernel that writes the slots has ended (sm_90).
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        ids = tl.load(ids_ptr + slot)
        expert = local_expert(ids, map_ptr, map_size, num_experts, HAS_MAP)
        row = slots_ptr + slot.to(tl.int64) * width
        value = tl.load(row + columns, mask=inside & (expert + columns * 0 >= 0), other=0.0)
        total = value if k == 0 else total + value
    row = out_ptr + token.to(tl.int64) * width
    tl.store(row + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
