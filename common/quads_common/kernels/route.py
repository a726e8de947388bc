"""Which slots go to which expert: tables that the grouped GEMM reads, made on the GPU."""

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]

from quads_common.kernels import _route

__all__ = ["Routes", "RoutingTable", "check_power_of_two", "make_table", "sum_slots_triton"]

# Slots that one program counts and places. A decode batch is one chunk, hence one launch.
MAX_CHUNK = 4096
ID_DTYPES = (torch.int32, torch.int64, torch.uint32, torch.int16, torch.uint8, torch.int8)


@dataclass(frozen=True)
class Routes:
    """The router's choice, as kernels read it: contiguous, copied where it is not.

    topk_ids: [T, k] integers, -1 skips. expert_map: [global experts] int32 local id or -1, or None.
    num_experts: experts of this rank. Ids that name none of them are skipped.

    Raises:
        ValueError: other shapes, or tensors on two devices. TypeError: other dtypes.
    """

    topk_ids: torch.Tensor
    expert_map: torch.Tensor | None
    num_experts: int

    def __post_init__(self) -> None:
        ids, expert_map = self.topk_ids, self.expert_map
        if ids.ndim != 2:
            raise ValueError(f"topk_ids must be [T, k], got {list(ids.shape)}")
        if ids.dtype not in ID_DTYPES:
            raise TypeError(f"topk_ids must be one of {list(map(str, ID_DTYPES))}, got {ids.dtype}")
        object.__setattr__(self, "topk_ids", ids.contiguous())
        if expert_map is None:
            return
        if expert_map.ndim != 1:
            raise ValueError(f"expert_map must be [global experts], got {list(expert_map.shape)}")
        if expert_map.dtype != torch.int32:
            raise TypeError(f"expert_map must be int32, got {expert_map.dtype}")
        if expert_map.device != ids.device:
            raise ValueError(f"expert_map is on {expert_map.device}, topk_ids on {ids.device}")
        object.__setattr__(self, "expert_map", expert_map.contiguous())

    @property
    def lookup(self) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The arguments of ``_route.local_expert``: ids, map, map size, experts."""
        expert_map = self.expert_map if self.expert_map is not None else self.topk_ids
        return self.topk_ids, expert_map, expert_map.numel(), self.num_experts


@dataclass(frozen=True)
class RoutingTable:
    """slots: [blocks * block_m] int32 slots sorted by expert, padding holds the number of slots.

    experts: [blocks] int32 expert of each block of block_m slots, -1 where nothing is left.
    """

    slots: torch.Tensor
    experts: torch.Tensor
    block_m: int


def check_power_of_two(name: str, value: int, least: int) -> None:
    if value < least or value & (value - 1):
        raise ValueError(f"{name} must be a power of two of at least {least}, got {value}")


def make_table(routes: Routes, block_m: int) -> RoutingTable:
    """Sort the slots by expert. Sizes depend on shapes only, so graphs can hold the tables.

    Raises:
        ValueError: block_m is no power of two.
    """
    check_power_of_two("block_m", block_m, 1)
    num_slots, experts = routes.topk_ids.numel(), routes.num_experts
    # A used expert adds at most block_m - 1 padding entries, and each block has a slot.
    padded = num_slots + min(experts, num_slots) * (block_m - 1)
    blocks = min(num_slots, padded // block_m)
    ids, expert_map, map_size, _ = routes.lookup
    slots = torch.empty(blocks * block_m, dtype=torch.int32, device=ids.device)
    block_experts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    if blocks == 0:
        return RoutingTable(slots, block_experts, block_m)
    chunk = min(MAX_CHUNK, max(32, triton.next_power_of_2(num_slots)))
    chunks = triton.cdiv(num_slots, chunk)
    bins = triton.next_power_of_2(experts + 1)
    options = {
        "HAS_MAP": routes.expert_map is not None,
        "CHUNK": chunk,
        "BINS": bins,
        "num_warps": 4 if chunk <= 1024 else 8,
    }
    counts = block_experts
    if chunks > 1:
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=ids.device)
        _route.count_routes[(chunks,)](
            ids, counts, num_slots, expert_map, map_size, experts,
            enable_fp_fusion=False, **options,
        )  # fmt: skip
    _route.place_routes[(experts, chunks)](
        ids, counts, slots, block_experts, num_slots, expert_map, map_size, experts, chunks, blocks,
        ONE_CHUNK=chunks == 1, BLOCK_M=block_m, enable_fp_fusion=False, **options,
    )  # fmt: skip
    return RoutingTable(slots, block_experts, block_m)


def sum_slots_triton(
    slots: torch.Tensor, routes: Routes, dtype: torch.dtype, *, early: bool = False
) -> torch.Tensor:
    """The top-k terms of each token added in float32, in slot order, rounded once to ``dtype``.

    slots: [T * k, H] float32, contiguous; the rows of skipped slots count as zero and are not read.
        early: the kernel that writes them lets this one start before it ends (``cuda/moe.cu``).

    Raises:
        ValueError: other slots.
    """
    tokens, top_k = routes.topk_ids.shape
    fits = slots.ndim == 2 and len(slots) == tokens * top_k and slots.is_contiguous()
    if not fits or slots.dtype != torch.float32:
        raise ValueError(
            f"slots must be contiguous float32 [{tokens * top_k}, H], got {slots.dtype} "
            f"{list(slots.shape)} with strides {list(slots.stride())}"
        )
    width = slots.shape[1]
    out = torch.empty((tokens, width), dtype=dtype, device=slots.device)
    if out.numel():
        block = min(1024, triton.next_power_of_2(width))
        ids, *rest = routes.lookup
        _route.sum_slots[(tokens, triton.cdiv(width, block))](
            slots, ids, out, width, *rest,
            HAS_MAP=routes.expert_map is not None, TOP_K=top_k, BLOCK=block,
            EARLY=early, num_warps=4, enable_fp_fusion=False,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out
