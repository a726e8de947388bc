"""What the kernels of ``cuda/moe.cu`` take: structures as in C++, with pointers to checked tensors.

The kernels would read a wrong dtype, shape, order or device as something else, or beyond the end,
so every tensor is checked here: on the host, without synchronization.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor
from quads_common.kernels.hopper_columns import HotColumns
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import Operand

__all__ = [
    "Inspection",
    "MoeArguments",
    "RowCompensation",
    "moe_arguments",
    "route_arguments",
]

FLOAT, INT, BF16 = torch.float32, torch.int32, torch.bfloat16
BYTE, E4M3 = torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True)
class RowCompensation:
    """What is folded into GEMM2's operand, of one list for all experts (L = 1) or one for each.

    block_mask: [L, I/16] bool, blocks whose residual is added; None: no RAC. hot_bits: [L, I/16]
    int32, ``operands.channel_bits``; None: no splice. With BF16 columns these channels are set to 0
    instead. alpha: factor of the residual.
    """

    block_mask: torch.Tensor | None
    hot_bits: torch.Tensor | None
    alpha: float = 1.0


@dataclass(frozen=True)
class Inspection:
    """What the fused kernel and its halves have between the GEMMs, for tests.

    y: [slots, 2I] bf16, GEMM1's rounded result. product: [slots, 8, I/8] bf16, the activation's.
    operand: [slots, 8, I/8] float16 and row_scale [slots] float32: GEMM2's operand, of W4A4 only.
    """

    y: torch.Tensor
    product: torch.Tensor
    operand: torch.Tensor
    row_scale: torch.Tensor


class _Routes(ctypes.Structure):
    """``Routes`` of routes.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("map_size", "experts", "slots", "top_k", "wide", "rows", "spread")
        ),
    )


class _Compensation(ctypes.Structure):
    """``Compensation`` of compensate.cuh."""

    _fields_ = (
        ("block_mask", ctypes.c_void_p),
        ("hot_bits", ctypes.c_void_p),
        ("mask_stride", ctypes.c_int),
        ("bits_stride", ctypes.c_int),
        ("alpha", ctypes.c_float),
    )


class _Columns(ctypes.Structure):
    """``Columns`` of columns.cuh."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w13", "hot", "w2", "channels")),
        ("channels_stride", ctypes.c_int),
        ("buffer", ctypes.c_int),
    )


class MoeArguments(ctypes.Structure):
    """``MoeArguments`` of strips.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global", "x", "row_scale",
                "router", "product", "out", "sample_map", "staged_rows", "staged_groups",
                "inspect_y", "inspect_operand", "inspect_scale",
            )
        ),
        ("routes", _Routes),
        ("rows", ctypes.c_int),
        ("limit", ctypes.c_float),
        ("compensation", _Compensation),
        ("columns", _Columns),
    )  # fmt: skip


class _Sizes(NamedTuple):
    """Of a call: device of all tensors, tokens, experts of a token, experts, H, I."""

    device: torch.device
    tokens: int
    top_k: int
    experts: int
    hidden: int
    inner: int

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k


def moe_arguments(
    operand: Operand,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    routes: Routes,
    router: torch.Tensor | None,
    *,
    rows: int,
    spread: int,
    limit: float | None,
    out: torch.Tensor,
    product: torch.Tensor | None,
    inspection: Inspection | None = None,
    compensation: RowCompensation | None = None,
    staging: Staging | None = None,
    columns: HotColumns | None = None,
) -> MoeArguments:
    """See ``hopper.decode_experts``, which allocates out and product, [slots, I] bf16 or None.

    rows, spread: as of ``route_arguments``. ``rows`` and ``columns.buffer`` of the structure, which
    change with the kernel, stay 0.
    """
    device = operand.values.device
    tokens, top_k = routes.topk_ids.shape
    experts, hidden, half_inner = w2.packed.shape
    sizes = _Sizes(device, tokens, top_k, experts, hidden, 2 * half_inner)
    if routes.num_experts > experts:
        raise ValueError(f"routes to {routes.num_experts} experts, w2 has {experts}")
    return MoeArguments(
        **_weight("w13", w13, experts, 2 * sizes.inner, hidden, device),
        **_weight("w2", w2, experts, hidden, sizes.inner, device),
        **_operand(operand, sizes),
        router=_pointer("router", router, FLOAT, (tokens, top_k), device),
        out=out.data_ptr(),
        routes=route_arguments(routes, device, rows, spread),
        limit=math.inf if limit is None else limit,
        compensation=_compensation(compensation, sizes),
        columns=_columns(columns, sizes),
        **_staging(staging, sizes),
        **_between(product, inspection, sizes),
    )


def route_arguments(routes: Routes, device: torch.device, rows: int, spread: int) -> _Routes:
    """rows: slots of a block at most. spread: multiprocessors that blocks are spread over, or 0."""
    ids, expert_map = routes.topk_ids, routes.expert_map
    dtype, shape = ids.dtype, ids.shape
    if dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {dtype}")
    size = 0 if expert_map is None else expert_map.numel()
    return _Routes(
        _pointer("topk_ids", ids, dtype, shape, device),
        _pointer("expert_map", expert_map, INT, (size,), device),
        size, routes.num_experts, ids.numel(), shape[1], dtype == torch.int64, rows, spread,
    )  # fmt: skip


def _operand(operand: Operand, sizes: _Sizes) -> dict[str, int | None]:
    values, row_scale, device = operand.values, operand.row_scale, sizes.device
    dtype = values.dtype
    if dtype not in (torch.float16, BF16):
        raise ValueError(f"operand must be float16 or bfloat16, got {dtype}")
    if (dtype == BF16) != (row_scale is None):
        raise ValueError(f"operand {dtype}: float16 has row scales, bfloat16 has none")
    shape = (sizes.tokens, 8, -(-sizes.hidden // 256) * 32)
    return {
        "x": _pointer("operand", values, dtype, shape, device),
        "row_scale": _pointer("row_scale", row_scale, FLOAT, (sizes.tokens,), device),
    }


def _weight(
    name: str, weight: QuantizedTensor, experts: int, n: int, k: int, device: torch.device
) -> dict[str, int | None]:
    """Of a weight [experts, n, k]."""
    packed, scale, total = weight.packed, weight.block_scale, weight.global_scale
    return {
        name: _pointer(name + ".packed", packed, BYTE, (experts, n, k // 2), device),
        name + "_scale": _pointer(
            name + ".block_scale", scale, E4M3, (experts, n, k // 16), device
        ),
        name + "_global": _pointer(name + ".global_scale", total, FLOAT, (experts,), device),
    }


def _compensation(lists: RowCompensation | None, sizes: _Sizes) -> _Compensation:
    if lists is None:
        return _Compensation()
    pointers, strides = [], []
    for name, tensor, dtype in (
        ("block_mask", lists.block_mask, torch.bool),
        ("hot_bits", lists.hot_bits, INT),
    ):
        count = 1 if tensor is None or tensor.shape[0] == 1 else sizes.experts
        pointers.append(_pointer(name, tensor, dtype, (count, sizes.inner // 16), sizes.device))
        if tensor is not None and tensor.data_ptr() % 4:  # they are copied by words
            raise ValueError(f"{name} must lie at a multiple of 4, is at {tensor.data_ptr():#x}")
        strides.append(0 if count == 1 else sizes.inner // 16)
    return _Compensation(*pointers, *strides, lists.alpha)


def _columns(columns: HotColumns | None, sizes: _Sizes) -> _Columns:
    if columns is None:
        return _Columns()
    columns.check(sizes.tokens, sizes.experts, sizes.hidden, sizes.inner, sizes.device)
    tensors = (columns.w13, columns.hot, columns.w2, columns.channels)
    channels = columns.channels
    stride = 0 if channels is None or channels.shape[0] == 1 else channels.shape[1]
    return _Columns(*(None if t is None else t.data_ptr() for t in tensors), stride)


def _staging(staging: Staging | None, sizes: _Sizes) -> dict[str, int | None]:
    if staging is None:
        return {}
    rows, device = staging.groups.numel(), sizes.device
    if rows % sizes.top_k:
        raise ValueError(f"{rows} staged rows are not {sizes.top_k} for each place")
    return {
        "sample_map": _pointer("sample_map", staging.sample_map, INT, (sizes.tokens,), device),
        "staged_rows": _pointer("staged_rows", staging.rows, BF16, (rows, sizes.inner), device),
        "staged_groups": _pointer("staged_groups", staging.groups, INT, (rows,), device),
    }


def _between(
    product: torch.Tensor | None, seen: Inspection | None, sizes: _Sizes
) -> dict[str, int | None]:
    """What is written between the GEMMs."""
    if seen is None:
        return {"product": None if product is None else product.data_ptr()}
    slots, inner, device = sizes.slots, sizes.inner, sizes.device
    planes = (slots, 8, inner // 8)
    return {
        "product": _pointer("product", seen.product, BF16, planes, device),
        "inspect_y": _pointer("y", seen.y, BF16, (slots, 2 * inner), device),
        "inspect_operand": _pointer("operand", seen.operand, torch.float16, planes, device),
        "inspect_scale": _pointer("row_scale", seen.row_scale, FLOAT, (slots,), device),
    }


def _pointer(
    name: str,
    tensor: torch.Tensor | None,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    device: torch.device,
) -> int | None:
    if tensor is None:
        return None
    fits = tensor.dtype == dtype and tensor.shape == shape and tensor.device == device
    if not fits or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} {list(shape)}, contiguous, on {device}, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
        )
    return tensor.data_ptr()
