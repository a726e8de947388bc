"""The experts of an MoE layer for few tokens on sm_90: launches of the kernels in ``cuda/``.

Weights are tiled (``weight_tiles``). A row's result does not depend on other rows or on padding,
nor on which of "fused" and "pair" runs (``DecodePlan``): a warp sums all of K in one order. "few"
sums K in ``hopper_memory.parts(K)`` parts, 1 to 4: one where no number from 2 to 4 divides K / 128.
"""

import ctypes
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
from quads_common.kernels.hopper_arguments import (
    Inspection,
    MoeArguments,
    RowCompensation,
    moe_arguments,
    route_arguments,
)
from quads_common.kernels.hopper_columns import (
    MAX_COLUMNS,
    NO_COLUMNS,
    STEP,
    Counts,
    HotColumns,
    why_not_columns,
)
from quads_common.kernels.hopper_memory import (
    ALL_SHARED,
    FEW_ROWS,
    WARPS,
    few_capacity,
    fused_capacity,
    launches,
    layout_defines,
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
    "processors",
    "why_not_hopper",
]

ARCHITECTURE = "sm_90a"
THREADS = WARPS * 32
# Slots of a block, experts and slots of a layer at most; blocks beyond those needed, where some are
# cut into parts for multiprocessors that are left over. The kernels are compiled with these.
MAX_ROWS, MAX_EXPERTS, MAX_SLOTS, MAX_SPARES = 32, 512, 4096, 12
# Up to so many slots a strip's K is spread over several warps; a warp sees all of them at a glance.
FEW_SLOTS = 32
# The fused form runs where this share of the multiprocessors gets an expert, and where an expert's
# mean number of slots is at most this share of a block.
FUSED_FROM, FUSED_SHARE = 0.7, 0.55
KERNELS = ("moe_both", "moe_up", "moe_down", "moe_up_few", "moe_down_few")
# Defines of moe.cu that are the contract's numbers, and the limits above.
CONSTANTS = {
    name: f"{float(getattr(contract, name)).hex()}f"
    for name in ("AMAX_FLOOR", "FLT_MAX", "ONE_SIXTH")
} | {
    "MAX_ROWS": str(MAX_ROWS),
    "MAX_EXPERTS": str(MAX_EXPERTS),
    "MAX_SLOTS": str(MAX_SLOTS),
    "MAX_SPARES": str(MAX_SPARES),
    "FEW_SLOTS": str(FEW_SLOTS),
    "COLUMN_STEP": str(STEP),
    "MAX_COLUMNS": str(MAX_COLUMNS),
}


@dataclass(frozen=True)
class DecodePlan:
    """form: "fused", both GEMMs in one kernel; "pair"; or "few", a pair that splits K over warps.

    rows: slots of a block at most.
    """

    form: Literal["fused", "pair", "few"]
    rows: int


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
    if not 1 <= experts <= MAX_EXPERTS:
        return f"{experts} experts (1 to {MAX_EXPERTS})"
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
    """Which form runs for so many tokens of a layer that ``why_not_hopper`` allows; None: too many.

    A fused block keeps one multiprocessor busy, so it pays where experts in use (of uniform
    routing) nearly fill the GPU once. Blocks beyond ``rows`` read their weights again, so an
    expert's mean number of slots must stay well below.

    Raises:
        ValueError: there is no expert.
    """
    if experts < 1:
        raise ValueError(f"{experts} experts (1 to {MAX_EXPERTS})")
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

    Raises:
        ValueError: a tensor that the kernels would misread, or that is not on the operand's GPU.
        TypeError: topk_ids that are not int32 or int64, an expert_map that is not int32.
    """
    slots, (_, hidden, inner) = routes.topk_ids.numel(), w2.shape
    device, dtype = operand.values.device, operand.values.dtype
    count = processors(device)
    rac = compensation is not None and compensation.block_mask is not None
    splice = compensation is not None and compensation.hot_bits is not None
    counts = NO_COLUMNS if columns is None else columns.counts
    if any(counts) and dtype != torch.float16:
        raise ValueError(f"BF16 columns need quantized activations, the operand is {dtype}")
    if counts[1] and not splice:
        raise ValueError("columns of w2 need the hot_bits of their channels")
    out = torch.empty((slots, hidden), dtype=torch.float32, device=device)
    product = None
    if plan.form != "fused" and inspection is None:
        product = torch.empty((slots, inner), dtype=torch.bfloat16, device=device)
    arguments = moe_arguments(
        operand, w13, w2, routes, router, rows=plan.rows, spread=_spread(plan, count),
        limit=limit, out=out, product=product, inspection=inspection, compensation=compensation,
        staging=staging, columns=columns,
    )  # fmt: skip
    kernels = _moe_kernels(
        device, dtype, hidden, inner, inspection is not None, rac, splice, counts
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    for launch in launches(plan.form, plan.rows, hidden, inner, counts):
        arguments.rows, arguments.columns.buffer = launch.rows, launch.buffer
        kernels[launch.kernel].launch(count, THREADS, launch.shared, arguments, stream)
    return out


def list_blocks(routes: Routes, plan: DecodePlan) -> torch.Tensor:
    """For tests: the blocks that the kernels make of a batch, int32 [1 + most * (2 + MAX_ROWS)].

    Their number, then expert, rows and slots of each.
    """
    slots, device = routes.topk_ids.numel(), routes.topk_ids.device
    most = min(slots, routes.num_experts + slots // plan.rows + MAX_SPARES)
    blocks = torch.empty(1 + most * (2 + MAX_ROWS), dtype=torch.int32, device=device)
    spread = _spread(plan, processors(device))
    arguments = MoeArguments(
        out=blocks.data_ptr(), routes=route_arguments(routes, device, plan.rows, spread)
    )
    stream = torch.cuda.current_stream(device).cuda_stream
    kernels = _moe_kernels(device, torch.float16, 128, 128, True)
    kernels["list_blocks"].launch(most, THREADS, 0, arguments, stream)
    return blocks


def _spread(plan: DecodePlan, processors: int) -> int:
    return processors if plan.form == "fused" else 0


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. Raises ``ValueError`` for another device."""
    if device.type != "cuda":
        raise ValueError(f"backend 'hopper' needs tensors on a CUDA device, got {device}")
    return _processors(device)


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
    defines |= layout_defines(hidden, inner, columns)
    defines["ARGUMENT_BYTES"] = str(ctypes.sizeof(MoeArguments))
    return defines | {"INSPECT": "1"} if inspect else defines
