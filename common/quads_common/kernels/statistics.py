"""``quads_common.compensation.observe`` in one launch per GEMM input.

Sampling, quantization as served and the merge into the buffers happen in one kernel, in place and
inside CUDA graphs. The same rows are counted, with the same energies of each; sums are float64 in
the order of the rows, one program for each tile of a group. Atomics only count programs, in the
spare bits of a counter.
"""

from collections.abc import Callable
from functools import cache

import torch
import triton  # type: ignore[import-untyped]

from quads_common.activation import Activation
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.statistics import ChannelStatistics
from quads_common.format import BLOCK_SIZE, check_block_aligned
from quads_common.kernels import _statistics
from quads_common.kernels.compensated_rows import list_bits
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import check_dtype

__all__ = ["Beside", "observe_triton"]

# Tokens that a program looks at together.
CHUNK = 128
# Blocks of a program's tile, and its warps: small ones find room beside a GEMM.
TILE_BLOCKS = 32
WARPS = 4
# Blocks of a row that it holds in registers to find the row's maximum.
ROW_BLOCKS = 64


def observe_triton(
    stats: ChannelStatistics,
    x: torch.Tensor,
    served: InputCompensation,
    period: int,
    *,
    row_mask: torch.Tensor | None = None,
    routes: Routes | None = None,
    activation: Activation | None = None,
    row_factor: torch.Tensor | None = None,
    hot_bits: torch.Tensor | None = None,
    planes: bool = False,
) -> None:
    """Count one of ``period`` real tokens, in place; see ``observe``.

    x: [T, K], or [T * k, K] with a row for each slot of ``routes``; [.., 2 * K] where a gated
        ``activation`` is applied first, and row_factor [rows] multiplies x first, as in
        ``rows.quantize_rows``.
    routes: the group of each row is its expert; skipped slots count nowhere. None: one group.
    hot_bits: ``list_bits`` of the served channels, if they are there. planes: element k of a row is
        at [k % 8, k // 8], as the ``hopper`` kernels write GEMM2's input.

    Raises:
        ValueError, TypeError: shapes or dtypes that do not fit.
    """
    check_dtype(x)
    groups, width = stats.mean.shape
    check_block_aligned(width, f"statistics of {width} channels")
    gated = activation is not None and activation.gated
    top_k = 1 if routes is None else routes.topk_ids.shape[1]
    tokens = x.shape[0] if routes is None else routes.topk_ids.shape[0]
    if tuple(x.shape) != (tokens * top_k, width * (2 if gated else 1)):
        raise ValueError(
            f"x must be {[tokens * top_k, width * (2 if gated else 1)]} for statistics of {groups} "
            f"groups and {width} channels, got {list(x.shape)}"
        )
    expected = 1 if routes is None else routes.num_experts
    if groups != expected:
        raise ValueError(f"statistics have {groups} groups, the rows have {expected}")
    if planes and (activation is not None or row_factor is not None):
        raise ValueError("rows in planes have had their activation and take no factor")
    if period < 1:
        raise ValueError(f"period {period} is not allowed: at least 1")
    if row_mask is not None and (row_mask.shape != (tokens,) or row_mask.dtype != torch.bool):
        raise ValueError(
            f"row_mask must be bool [{tokens}], got {row_mask.dtype} {list(row_mask.shape)}"
        )
    if tokens == 0 or top_k == 0 or groups == 0:
        return
    x = x if x.stride(-1) == 1 else x.contiguous()
    channels = served.channels
    if channels is not None and channels.shape[0] not in (1, groups):
        raise ValueError(f"{channels.shape[0]} channel lists for {groups} groups: one, or one each")
    splice = channels is not None and channels.shape[1] > 0
    if channels is not None and splice and hot_bits is None:
        hot_bits = list_bits(channels, width)
    blocks = min(TILE_BLOCKS, triton.next_power_of_2(width // BLOCK_SIZE))
    limit = activation.limit if activation is not None else None
    act_alpha, beta = (activation.alpha, activation.beta) if activation else (0.0, 0.0)
    ids, expert_map, map_size, _ = routes.lookup if routes is not None else (x, x, 0, 0)
    _statistics.observe_kernel[(groups, triton.cdiv(width, blocks * BLOCK_SIZE))](
        x,
        row_factor if row_factor is not None else x,
        row_mask.contiguous().view(torch.uint8) if row_mask is not None else x,
        ids,
        expert_map,
        hot_bits if hot_bits is not None else x,
        stats.count, stats.mean, stats.m2, stats.plain_energy, stats.served_energy,
        stats.left_energy, stats.underflows, stats.channel_energy,
        stats.offered,
        stats.enabled.view(torch.uint8),
        tokens, map_size, groups, x.stride(0), limit or 0.0, act_alpha, beta, served.alpha,
        WIDTH=width, PERIOD=period, TOP_K=top_k,
        ACTIVATION="planes" if planes else "none" if activation is None else activation.name,
        HAS_LIMIT=limit is not None,
        HAS_FACTOR=row_factor is not None,
        HAS_MASK=row_mask is not None,
        HAS_IDS=routes is not None,
        HAS_MAP=routes is not None and routes.expert_map is not None,
        SPLICE=splice,
        MANY=channels is not None and channels.shape[0] > 1,
        PER_CHANNEL=stats.channel_energy.shape[1] > 0,
        CHUNK=CHUNK, SLOTS=triton.next_power_of_2(top_k), BLOCKS=blocks,
        ROW_BLOCKS=min(ROW_BLOCKS, triton.next_power_of_2(width // BLOCK_SIZE)),
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip


class Beside:
    """Launches on streams of their own, beside each other and what the current stream goes on with.

    What they read must stay until ``join``. On a CPU, where kernels are interpreted, there are no
    streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used: list[torch.cuda.Stream] = []

    def run(self, launch: Callable[[], None]) -> None:
        """Launch after everything that the current stream has launched so far."""
        if self.device.type != "cuda":
            launch()
            return
        main = torch.cuda.current_stream(self.device)
        side = _side_stream(self.device, main.cuda_stream, len(self.used))
        self.used.append(side)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch()

    def join(self) -> None:
        """What the current stream launches from now on comes after all of it."""
        for side in self.used:
            torch.cuda.current_stream(self.device).wait_stream(side)
        self.used.clear()


@cache
def _side_stream(device: torch.device, stream: int, number: int) -> torch.cuda.Stream:
    """Some for each stream, so that streams that are captured at the same time stay apart."""
    return torch.cuda.Stream(device)
