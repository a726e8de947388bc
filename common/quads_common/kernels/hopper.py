"""The experts of an MoE layer for few tokens on sm_90: launches of the kernels in ``cuda/``.

Weights are tiled (``weight_tiles``). A row's result does not depend on other rows or on padding,
nor on which of "fused" and "pair" runs (``DecodePlan``): a warp sums all of K in one order. "few"
sums K in two to four parts.
"""

import ctypes
import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from quads_common import format as contract
from quads_common.activation import Activation
from quads_common.compensation.staging import Staging
from quads_common.format import QuantizedTensor
from quads_common.gemm import ActFormat
from quads_common.kernels.cuda.nvrtc import Kernel, compile_cubin, load_kernels
from quads_common.kernels.hopper_columns import NO_COLUMNS, Counts, HotColumns, why_not_columns
from quads_common.kernels.hopper_memory import (
    ALL_SHARED,
    FEW_ROWS,
    few_capacity,
    fused_capacity,
    launches,
    pair_capacity,
)
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import Operand
from quads_common.weight_tiles import TileLayout

__all__ = [
    "DecodePlan",
    "Inspection",
    "RowCompensation",
    "decode_experts",
    "decode_plan",
    "list_blocks",
    "moe_defines",
    "prepare",
    "why_not_hopper",
]

ARCHITECTURE = "sm_90a"
THREADS = 512
# Of routes.cuh: slots of a block, experts and slots of a layer at most; blocks beyond those needed.
MAX_ROWS, MAX_EXPERTS, MAX_SLOTS, MAX_SPARES = 32, 512, 4096, 12
# Up to so many slots a strip's K is spread over several warps.
FEW_SLOTS = 32
# The fused form runs where this share of the multiprocessors gets an expert, and where an expert's
# mean number of slots is at most this share of a block.
FUSED_FROM, FUSED_SHARE = 0.7, 0.55
KERNELS = ("moe_both", "moe_up", "moe_down", "moe_up_few", "moe_down_few")
# Defines of moe.cu that are the contract's numbers.
CONSTANTS = {
    name: f"{float(getattr(contract, name)).hex()}f"
    for name in ("AMAX_FLOOR", "FLT_MAX", "ONE_SIXTH")
}


@dataclass(frozen=True)
class DecodePlan:
    """form: "fused", both GEMMs in one kernel; "pair"; or "few", a pair that splits K over warps.

    rows: slots of a block at most.
    """

    form: Literal["fused", "pair", "few"]
    rows: int


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


def why_not_hopper(
    experts: int, hidden: int, inner: int, activation: Activation, columns: Counts = NO_COLUMNS
) -> str | None:
    """Why the kernels do not run a layer of this shape; None if they do.

    columns: how many hot channels of w13's and w2's input have BF16 columns.
    """
    if activation.name != "silu":
        return f"activation {activation.name!r} (only 'silu')"
    if not TileLayout(True).fits(2 * inner, hidden) or not TileLayout(False).fits(hidden, inner):
        return f"hidden {hidden} and intermediate {inner} are not both multiples of 128"
    if experts > MAX_EXPERTS:
        return f"{experts} experts (at most {MAX_EXPERTS})"
    if reason := why_not_columns(columns):
        return reason
    if few_capacity(hidden, inner, columns) < FEW_ROWS:
        return f"8 rows of {max(hidden, inner)} do not fit in shared memory"
    return None


def prepare(
    hidden: int,
    inner: int,
    act: ActFormat,
    rac: bool = False,
    splice: bool = False,
    columns: Counts = NO_COLUMNS,
) -> None:
    """Compile and load the kernels of a shape for the current GPU, before anything is captured.

    rac, splice: what ``RowCompensation`` will have. columns: as in ``why_not_hopper``.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    dtype = torch.float16 if act == "nvfp4" else torch.bfloat16
    _moe_kernels(device, dtype, hidden, inner, False, rac, splice, columns)


def decode_plan(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    inner: int,
    processors: int,
    columns: Counts = NO_COLUMNS,
) -> DecodePlan | None:
    """Which form runs for so many tokens; None: neither, too many.

    A fused block keeps one multiprocessor busy, so it pays where experts in use (of uniform
    routing) nearly fill the GPU once. Blocks beyond ``rows`` read their weights again, so an
    expert's mean number of slots must stay well below.
    """
    slots = tokens * top_k
    if slots > MAX_SLOTS:
        return None
    if slots <= FEW_SLOTS:
        return DecodePlan("few", FEW_ROWS)
    active = experts * (1 - (1 - min(1.0, top_k / experts)) ** tokens)
    mean = slots / max(1.0, active)
    rows = fused_capacity(hidden, inner, columns)
    if FUSED_FROM * processors <= active <= processors and mean <= FUSED_SHARE * rows:
        return DecodePlan("fused", min(MAX_ROWS, rows))
    rows = min(MAX_ROWS, pair_capacity(hidden, inner, columns))
    return DecodePlan("pair", rows) if mean <= rows / 2 + 1 else None


def decode_experts(
    operand: Operand,
    w13: QuantizedTensor,
    w2: QuantizedTensor,
    routes: Routes,
    router: torch.Tensor | None,
    plan: DecodePlan,
    limit: float | None,
    inspection: Inspection | None = None,
    compensation: RowCompensation | None = None,
    staging: Staging | None = None,
    columns: HotColumns | None = None,
) -> torch.Tensor:
    """Each slot's (w2 @ product) * router weight, float32 [slots, H]; skipped slots not written.

    operand: the layer's input. w13, w2: tiled. router: [T, k] float32, None: 1. compensation: of
    GEMM2's input, W4A4 only. staging: where GEMM2's input is kept for sampled tokens, before it is
    quantized; W4A4 only, bf16. columns: of hot channels, which are 0 in ``operand`` and get 0 in
    GEMM2's; W4A4 only.
    """
    tokens, top_k = routes.topk_ids.shape
    hidden, inner = w2.shape[1], w2.shape[2]
    slots, device = tokens * top_k, operand.values.device
    rac = compensation is not None and compensation.block_mask is not None
    splice = compensation is not None and compensation.hot_bits is not None
    counts, dtype = NO_COLUMNS, operand.values.dtype
    if columns is not None:
        columns.check(tokens, w2.shape[0], hidden, inner)
        counts = columns.counts
        if any(counts) and dtype != torch.float16:
            raise ValueError(f"BF16 columns need quantized activations, the operand is {dtype}")
        if counts[1] and not splice:
            raise ValueError("columns of w2 need the hot_bits of their channels")
    kernels = _moe_kernels(
        device, dtype, hidden, inner, inspection is not None, rac, splice, counts
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    processors = _processors(device)
    out = torch.empty((slots, hidden), dtype=torch.float32, device=device)
    product = None
    if inspection is not None:
        product = inspection.product
    elif plan.form != "fused":
        product = torch.empty((slots, inner), dtype=torch.bfloat16, device=device)
    arguments = _MoeArguments(
        w13=_pointer(w13.packed), w13_scale=_pointer(w13.block_scale), w2=_pointer(w2.packed),
        w2_scale=_pointer(w2.block_scale), w13_global=_pointer(w13.global_scale),
        w2_global=_pointer(w2.global_scale), x=_pointer(operand.values),
        row_scale=_pointer(operand.row_scale), router=_pointer(router), product=_pointer(product),
        out=_pointer(out), routes=_route_arguments(routes, plan, processors),
        limit=math.inf if limit is None else limit, compensation=_compensation(compensation),
        columns=_columns(columns), **_staging(staging, tokens, top_k, inner),
    )  # fmt: skip
    if inspection is not None:
        arguments.inspect_y = _pointer(inspection.y)
        arguments.inspect_operand = _pointer(inspection.operand)
        arguments.inspect_scale = _pointer(inspection.row_scale)
    for launch in launches(plan.form, plan.rows, hidden, inner, counts):
        arguments.rows, arguments.columns.buffer = launch.rows, launch.buffer
        kernels[launch.kernel].launch(processors, THREADS, launch.shared, arguments, stream)
    return out


def list_blocks(routes: Routes, plan: DecodePlan) -> torch.Tensor:
    """For tests: the blocks that the kernels make of a batch, int32 [1 + most * (2 + MAX_ROWS)].

    Their number, then expert, rows and slots of each.
    """
    slots, device = routes.topk_ids.numel(), routes.topk_ids.device
    most = min(slots, routes.num_experts + slots // plan.rows + MAX_SPARES)
    blocks = torch.empty(1 + most * (2 + MAX_ROWS), dtype=torch.int32, device=device)
    arguments = _MoeArguments(
        out=_pointer(blocks), routes=_route_arguments(routes, plan, _processors(device))
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    kernels = _moe_kernels(device, torch.float16, 128, 128, True)
    kernels["list_blocks"].launch(most, THREADS, 0, arguments, stream)
    return blocks


class _Routes(ctypes.Structure):
    """``Routes`` of routes.cuh."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("expert_map", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in (
                "map_size",
                "experts",
                "slots",
                "top_k",
                "wide",
                "rows",
                "spread",
            )
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


class _MoeArguments(ctypes.Structure):
    """``MoeArguments`` of moe.cu."""

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


def _route_arguments(routes: Routes, plan: DecodePlan, processors: int) -> _Routes:
    ids, expert_map = routes.topk_ids, routes.expert_map
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {ids.dtype}")
    if expert_map is not None and expert_map.dtype != torch.int32:
        raise TypeError(f"expert_map must be int32, got {expert_map.dtype}")
    return _Routes(
        _pointer(ids), _pointer(expert_map), 0 if expert_map is None else expert_map.numel(),
        routes.num_experts, ids.numel(), ids.shape[1], ids.dtype == torch.int64, plan.rows,
        processors if plan.form == "fused" else 0,
    )  # fmt: skip


def _compensation(lists: RowCompensation | None) -> _Compensation:
    if lists is None:
        return _Compensation()
    mask, bits = lists.block_mask, lists.hot_bits
    for name, tensor in (("block_mask", mask), ("hot_bits", bits)):
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, has strides {list(tensor.stride())}")
        if tensor is not None and tensor.data_ptr() % 4:  # they are copied by words
            raise ValueError(f"{name} must lie at a multiple of 4, is at {tensor.data_ptr():#x}")
    strides = (0 if t is None or t.shape[0] == 1 else t.shape[1] for t in (mask, bits))
    return _Compensation(_pointer(mask), _pointer(bits), *strides, lists.alpha)


def _columns(columns: HotColumns | None) -> _Columns:
    if columns is None:
        return _Columns()
    channels = columns.channels
    stride = 0 if channels is None or channels.shape[0] == 1 else channels.shape[1]
    pointers = (_pointer(t) for t in (columns.w13, columns.hot, columns.w2, channels))
    return _Columns(*pointers, stride)


def _staging(staging: Staging | None, tokens: int, top_k: int, inner: int) -> dict[str, int | None]:
    if staging is None:
        return {}
    wanted = {
        "sample_map": (staging.sample_map, torch.int32, (tokens,)),
        "staged_rows": (staging.rows, torch.bfloat16, (staging.groups.numel(), inner)),
        "staged_groups": (staging.groups, torch.int32, (staging.groups.numel(),)),
    }
    for name, (tensor, dtype, shape) in wanted.items():
        if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be {dtype} {list(shape)}, contiguous, got {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
    if staging.groups.numel() % top_k:
        raise ValueError(f"{staging.groups.numel()} staged rows are not {top_k} for each place")
    return {name: _pointer(tensor) for name, (tensor, *_) in wanted.items()}


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _moe_kernels(
    device: torch.device,
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    inspect: bool,
    rac: bool = False,
    splice: bool = False,
    columns: Counts = NO_COLUMNS,
) -> dict[str, Kernel]:
    """The kernels of moe.cu for a shape and operands of a dtype, compiled at the first call."""
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # a process that has used no GPU yet has no context
        defines = moe_defines(dtype, hidden, inner, inspect, rac, splice, columns)
        cubin = compile_cubin("moe", ARCHITECTURE, defines)
        return load_kernels(cubin, [*KERNELS, *(["list_blocks"] if inspect else [])], ALL_SHARED)


def moe_defines(
    dtype: torch.dtype, hidden: int, inner: int, inspect: bool, rac: bool = False,
    splice: bool = False, columns: Counts = NO_COLUMNS,
) -> dict[str, str]:  # fmt: skip
    """What moe.cu is compiled with."""
    defines = {"FORMAT": "FP16" if dtype == torch.float16 else "BF16"}
    defines |= {"HIDDEN": str(hidden), "INNER": str(inner)} | CONSTANTS
    defines |= {"WITH_RAC": str(int(rac)), "WITH_SPLICE": str(int(splice))}
    defines |= {"COLUMNS13": str(columns[0]), "COLUMNS2": str(columns[1])}
    defines["ARGUMENT_BYTES"] = str(ctypes.sizeof(_MoeArguments))
    return defines | {"INSPECT": "1"} if inspect else defines
