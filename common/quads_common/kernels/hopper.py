"""The experts of an MoE layer for few tokens on sm_90: launches of the kernels in ``cuda/``.

Weights are tiled (``weight_tiles``). A row's result does not depend on other rows, on padding or on
which of the forms of ``DecodePlan`` runs: a warp sums all of K in one order.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache

import torch

from quads_common import format as contract
from quads_common.activation import Activation
from quads_common.format import QuantizedTensor
from quads_common.kernels.cuda.nvrtc import Kernel, compile_cubin, load_kernels
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import Operand
from quads_common.weight_tiles import TileLayout

__all__ = [
    "DecodePlan",
    "Inspection",
    "decode_experts",
    "decode_plan",
    "make_decode_table",
    "why_not_hopper",
]

ARCHITECTURE = "sm_90a"
# Dynamic shared memory that a thread block may have beside the kernels' static variables.
SHARED = 224 * 1024
THREADS, ROUTE_THREADS = 512, 1024
# Of the work table (table.cuh) and of the routing kernel.
TABLE_ROW, MAX_ROWS, MAX_SPARES = 40, 32, 12
MAX_EXPERTS, MAX_SLOTS = 512, 4096
OWN_SLOTS = 32
# The fused form runs where this share of the multiprocessors gets an expert, and where an expert's
# mean number of slots is at most this share of a block.
FUSED_FROM, FUSED_SHARE = 0.9, 0.3
# Defines of moe.cu that are the contract's numbers.
CONSTANTS = {
    name: f"{float(getattr(contract, name)).hex()}f"
    for name in ("AMAX_FLOOR", "FLT_MAX", "ONE_SIXTH")
}


@dataclass(frozen=True)
class DecodePlan:
    """fused: both GEMMs in one kernel. rows: slots of a block at most."""

    fused: bool
    rows: int


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


def why_not_hopper(experts: int, hidden: int, inner: int, activation: Activation) -> str | None:
    """Why the kernels do not run a layer of this shape; None if they do."""
    if activation.name != "silu":
        return f"activation {activation.name!r} (only 'silu')"
    if not TileLayout(True).fits(2 * inner, hidden) or not TileLayout(False).fits(hidden, inner):
        return f"hidden {hidden} and intermediate {inner} are not both multiples of 128"
    if experts > MAX_EXPERTS:
        return f"{experts} experts (at most {MAX_EXPERTS})"
    if min(_half_capacity(hidden, inner)) < 8:
        return f"8 rows of {max(hidden, inner)} do not fit in shared memory"
    return None


def decode_plan(
    tokens: int, top_k: int, experts: int, hidden: int, inner: int, processors: int
) -> DecodePlan | None:
    """Which form runs for so many tokens; None: neither, too many.

    A fused block keeps one multiprocessor busy, so it pays where experts in use (of uniform
    routing) nearly fill the GPU once. Blocks beyond ``rows`` read their weights again, so an
    expert's mean number of slots must stay well below.
    """
    slots = tokens * top_k
    if slots > MAX_SLOTS:
        return None
    active = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
    mean = slots / max(1.0, active)
    rows = _fused_capacity(hidden, inner)
    if FUSED_FROM * processors <= active <= processors and mean <= FUSED_SHARE * rows:
        return DecodePlan(True, min(MAX_ROWS, rows))
    rows = min(MAX_ROWS, *_half_capacity(hidden, inner))
    return DecodePlan(False, rows) if mean <= rows / 2 + 1 else None


def _fused_capacity(hidden: int, inner: int) -> int:
    """Rows of a block of the fused kernel that fit in shared memory, in whole groups of 8."""
    return SHARED // (_x_row(hidden) + _product_row(inner)) // 8 * 8


def _half_capacity(hidden: int, inner: int) -> tuple[int, int]:
    """The same of all rows in shared memory at a time, of the kernels for each GEMM."""
    return SHARED // _x_row(hidden) // 8 * 8, SHARED // _product_row(inner) // 8 * 8


def decode_experts(
    operand: Operand,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    routes: Routes,
    router: torch.Tensor | None,
    plan: DecodePlan,
    limit: float | None,
    inspection: Inspection | None = None,
) -> torch.Tensor:
    """Each slot's (w2 @ product) * router weight, float32 [slots, H]; skipped slots not written.

    operand: the layer's input. w13, w2: tiled. router: [T, k] float32, None: 1.
    """
    tokens, top_k = routes.topk_ids.shape
    hidden, inner = w2.shape[1], w2.shape[2]
    slots, device = tokens * top_k, operand.values.device
    kernels = _moe_kernels(device, operand.values.dtype, hidden, inner, inspection is not None)
    stream = torch.cuda.current_stream(device).cuda_stream
    processors = _processors(device)
    out = torch.empty((slots, hidden), dtype=torch.float32, device=device)
    table = None
    if plan.fused or slots > OWN_SLOTS or plan.rows < MAX_ROWS:
        table = _make_table(routes, plan, processors, stream)
    if inspection is not None:
        product = inspection.product
    elif plan.fused:
        product = None
    else:
        product = torch.empty((slots, inner), dtype=torch.bfloat16, device=device)
    arguments = _MoeArguments(
        w13=_pointer(w13.packed), w13_scale=_pointer(w13.block_scale), w2=_pointer(w2.packed),
        w2_scale=_pointer(w2.block_scale), w13_global=_pointer(w13.global_scale),
        w2_global=_pointer(w2.global_scale), x=_pointer(operand.values),
        row_scale=_pointer(operand.row_scale), router=_pointer(router), table=_pointer(table),
        product=_pointer(product), out=_pointer(out), routes=_route_arguments(routes),
        limit=math.inf if limit is None else limit,
    )  # fmt: skip
    if inspection is not None:
        arguments.inspect_y = _pointer(inspection.y)
        arguments.inspect_operand = _pointer(inspection.operand)
        arguments.inspect_scale = _pointer(inspection.row_scale)
    if plan.fused:
        arguments.rows = plan.rows
        shared = plan.rows * (_x_row(hidden) + _product_row(inner))
        kernels["moe_both"].launch(processors, THREADS, shared, arguments, stream)
        return out
    for name, row, rows in (
        ("moe_up", _x_row(hidden), _half_capacity(hidden, inner)[0]),
        ("moe_down", _product_row(inner), _half_capacity(hidden, inner)[1]),
    ):
        arguments.rows = rows
        kernels[name].launch(processors, THREADS, rows * row, arguments, stream)
    return out


def make_decode_table(routes: Routes, plan: DecodePlan) -> torch.Tensor:
    """The work table of table.cuh, int32 [1 + blocks, 40]; not set behind the last block."""
    device = routes.topk_ids.device
    stream = torch.cuda.current_stream(device).cuda_stream
    return _make_table(routes, plan, _processors(device), stream)


def _make_table(routes: Routes, plan: DecodePlan, processors: int, stream: int) -> torch.Tensor:
    slots, device = routes.topk_ids.numel(), routes.topk_ids.device
    blocks = min(slots, routes.num_experts + slots // plan.rows + MAX_SPARES)
    table = torch.empty((1 + blocks, TABLE_ROW), dtype=torch.int32, device=device)
    arguments = _RouteArguments(
        _route_arguments(routes), _pointer(table), plan.rows, processors if plan.fused else 0
    )
    _route_kernels(device)["route_slots"].launch(1, ROUTE_THREADS, 0, arguments, stream)
    return table


class _Routes(ctypes.Structure):
    """``Routes`` of table.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("map_size", "experts", "slots", "top_k", "wide")),
    )


class _MoeArguments(ctypes.Structure):
    """``MoeArguments`` of moe.cu."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "w13", "w13_scale", "w2", "w2_scale", "w13_global", "w2_global", "x", "row_scale",
                "router", "table", "product", "out", "inspect_y", "inspect_operand",
                "inspect_scale",
            )
        ),
        ("routes", _Routes),
        ("rows", ctypes.c_int),
        ("limit", ctypes.c_float),
    )  # fmt: skip


class _RouteArguments(ctypes.Structure):
    """``RouteArguments`` of route.cu."""

    _fields_ = (
        ("routes", _Routes),
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("spread", ctypes.c_int),
    )


def _route_arguments(routes: Routes) -> _Routes:
    ids, expert_map = routes.topk_ids, routes.expert_map
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {ids.dtype}")
    if expert_map is not None and expert_map.dtype != torch.int32:
        raise TypeError(f"expert_map must be int32, got {expert_map.dtype}")
    return _Routes(
        _pointer(ids), _pointer(expert_map), 0 if expert_map is None else expert_map.numel(),
        routes.num_experts, ids.numel(), ids.shape[1], ids.dtype == torch.int64,
    )  # fmt: skip


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _x_row(hidden: int) -> int:
    """Bytes of an input row in shared memory: ``X_ROW`` of moe.cu."""
    return -(-hidden // 256) * 512 + 32


def _product_row(inner: int) -> int:
    """``PRODUCT_ROW`` of moe.cu."""
    return inner * 2 + 32


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _moe_kernels(
    device: torch.device, dtype: torch.dtype, hidden: int, inner: int, inspect: bool
) -> dict[str, Kernel]:
    """The kernels of moe.cu for a shape and operands of a dtype, compiled at the first call."""
    with torch.cuda.device(device):
        cubin = compile_cubin("moe", ARCHITECTURE, moe_defines(dtype, hidden, inner, inspect))
        return load_kernels(cubin, ["moe_both", "moe_up", "moe_down"], SHARED)


def moe_defines(dtype: torch.dtype, hidden: int, inner: int, inspect: bool) -> dict[str, str]:
    """What moe.cu is compiled with."""
    defines = {"FORMAT": "FP16" if dtype == torch.float16 else "BF16"}
    defines |= {"HIDDEN": str(hidden), "INNER": str(inner)} | CONSTANTS
    return defines | {"INSPECT": "1"} if inspect else defines


@cache
def _route_kernels(device: torch.device) -> dict[str, Kernel]:
    with torch.cuda.device(device):
        return load_kernels(compile_cubin("route", ARCHITECTURE, {}), ["route_slots"], 0)
