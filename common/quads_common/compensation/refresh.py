"""From statistics to a new selection, at a boundary: average, rank, write the lists in place.

A refresh turns each list's sums into scores per token and averages them over refreshes::

    score   = energy of a block, or variance of a channel, per counted row
    average = ema * average + (1 - ema) * score       # the first score as it is

A list with fewer than ``min_tokens`` rows keeps collecting instead; until its first average it uses
every block and no channel. Where the hot channels of a block changed, the block's average begins
anew: its energy is that of what the hot channels leave. For the same reason a list whose hot
channels change forgets what was counted of these energies; where they rank blocks, ``min_tokens``
means rows under the hot channels in force.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from quads_common.compensation.adaptive import allocate_blocks
from quads_common.compensation.metrics import SiteMetrics
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.selection import (
    Selection,
    block_count,
    hot_mask,
    jaccard,
    new_selection,
    top_mask,
    write_selection,
)
from quads_common.compensation.site import Site
from quads_common.compensation.statistics import (
    ChannelStatistics,
    new_statistics,
    reduced,
    reset,
)
from quads_common.format import BLOCK_SIZE

__all__ = [
    "AllReduce",
    "Averages",
    "SiteState",
    "forget_served",
    "new_site_state",
    "refresh",
    "refresh_is_due",
]

# Sums a tensor over ranks, in place.
AllReduce = Callable[[torch.Tensor], object]


@dataclass(frozen=True)
class Averages:
    """Buffers of G lists, changed in place only.

    block: [G, K/16] float64 averaged score; block_known: [G, K/16] bool, it belongs to the hot
        channels in force. channel: [G, K] float64, or [G, 0] without splice.
    ready: [G] bool, the list has an average. tokens: [G] float64 rows in all averages so far.
    uncovered: [G] float64, rows in the statistics' count that ``served_energy``, ``left_energy``
        and ``underflows`` lack, see ``forget_served``.
    refreshes: [1] int64.
    """

    block: torch.Tensor
    block_known: torch.Tensor
    channel: torch.Tensor
    ready: torch.Tensor
    uncovered: torch.Tensor
    tokens: torch.Tensor
    refreshes: torch.Tensor

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class SiteState:
    """All buffers of a site; an engine registers them so that sleep and reload keep them."""

    site: Site
    statistics: ChannelStatistics
    averages: Averages
    selection: Selection

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by a name that a module accepts for a buffer."""
        parts = {
            "statistics": self.statistics.buffers(),
            "averages": self.averages.buffers(),
            "selection": self.selection.buffers(),
        }
        return {f"{part}_{name}": t for part, found in parts.items() for name, t in found.items()}


def new_site_state(
    site: Site, options: CompensationOptions, device: torch.device | str = "cpu"
) -> SiteState:
    """Empty buffers: nothing counted, every block and no channel selected."""
    groups = len(site.groups)
    selection = new_selection(site, options, device)
    splice = selection.channels.shape[1] > 0

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    statistics = new_statistics(
        groups,
        site.width,
        device=device,
        channel_energy=splice and options.splice_statistic == "residual",
    )
    averages = Averages(
        block=zeros(groups, site.blocks),
        block_known=zeros(groups, site.blocks, dtype=torch.bool),
        channel=zeros(groups, site.width if splice else 0),
        ready=zeros(groups, dtype=torch.bool),
        uncovered=zeros(groups),
        tokens=zeros(groups),
        refreshes=zeros(1, dtype=torch.int64),
    )
    return SiteState(site, statistics, averages, selection)


def refresh_is_due(boundary: int, options: CompensationOptions) -> bool:
    """Whether the boundary with this number, counted from 1, refreshes the selection."""
    return boundary % options.refresh_interval == 0


def forget_served(state: SiteState, lists: torch.Tensor) -> None:
    """The hot channels of some ``lists`` ([G] bool) change: energies of what they leave, anew."""
    for tensor in (
        state.statistics.served_energy,
        state.statistics.left_energy,
        state.statistics.underflows,
    ):
        tensor.masked_fill_(lists.unsqueeze(1), 0)
    uncovered = state.averages.uncovered
    uncovered.copy_(torch.where(lists, state.statistics.count, uncovered))


def refresh(
    states: Sequence[SiteState],
    options: CompensationOptions,
    all_reduce: Callable[[Site], AllReduce | None] | None = None,
    *,
    in_force: bool = True,
    rows: Mapping[str, int] | None = None,
) -> list[SiteMetrics]:
    """Choose the lists of all sites anew, in place. Not for inside a forward.

    in_force: rows are served with the new lists from now on; else the caller takes them away, and
        calls ``forget_served`` when they come into force.
    rows: of the weight that a site's input is multiplied with, by name: what a block costs with
        ``adaptive``. None: the same for all.
    all_reduce: for each site the sum over the replicas that see other tokens than this rank, or
        None where there are none. All replicas then choose the same lists.
    """
    merged = []
    for state in states:
        reduce = all_reduce(state.site) if all_reduce is not None else None
        stats, uncovered = state.statistics, state.averages.uncovered
        if reduce is not None:
            stats, uncovered = reduced(stats, reduce), uncovered.clone()
            reduce(uncovered)
        merged.append((stats, stats.count - uncovered))
    measured = [_measure(s, *m, options) for s, m in zip(states, merged, strict=True)]
    for state, (stats, covered) in zip(states, merged, strict=True):
        _absorb(state, stats, covered, options)
    counts = _block_counts(states, options, rows)
    return [
        _select(state, count, found, in_force)
        for state, count, found in zip(states, counts, measured, strict=True)
    ]


@dataclass(frozen=True)
class _Measured:
    before: float
    after: float
    signal: float
    underflow_share: float
    tokens: int


def _measure(
    state: SiteState, stats: ChannelStatistics, covered: torch.Tensor, options: CompensationOptions
) -> _Measured:
    """What was served since the last refresh, with the selection in force.

    covered: [G] rows in the energies that depend on the hot channels.
    """
    rows = float(stats.count.sum())
    tokens = round(rows + float(state.averages.tokens.sum()))
    if rows == 0:
        return _Measured(math.nan, math.nan, math.nan, math.nan, tokens)
    chosen = state.selection.block_mask & (options.ratio(state.site.kind) > 0)
    after = torch.where(chosen, stats.left_energy, stats.served_energy).sum()
    signal = (stats.second_moment * stats.count.unsqueeze(1)).sum()
    pairs = (chosen.sum(dim=1) * covered).sum()
    under_lists = float(covered.sum())
    lost = torch.where(chosen, stats.underflows, 0).sum()
    return _Measured(
        float(stats.plain_energy.sum()) / rows,
        float(after) / under_lists if under_lists else math.nan,
        float(signal) / rows,
        float(lost / pairs.clamp(min=1)) if under_lists else math.nan,
        tokens,
    )


def _absorb(
    state: SiteState, stats: ChannelStatistics, covered: torch.Tensor, options: CompensationOptions
) -> None:
    """Average the scores of lists that have enough rows, and start counting them from zero."""
    averages = state.averages
    ranked_by_served = options.ratio(state.site.kind) > 0 and options.rac_statistic == "residual"
    enough = (covered if ranked_by_served else stats.count) >= options.min_tokens
    known, per_list = averages.block_known, enough.unsqueeze(1)
    scores = _block_scores(state, stats, covered, options)
    _blend(averages.block, scores, per_list, known, options.ema)
    if averages.channel.shape[1]:
        scores = _channel_scores(stats, options.splice_statistic)
        ready = averages.ready.unsqueeze(1)
        _blend(averages.channel, scores, per_list, ready, options.ema)
    known.logical_or_(per_list)
    averages.ready.logical_or_(enough)
    averages.tokens.add_(torch.where(enough, stats.count, 0))
    averages.refreshes.add_(1)
    averages.uncovered.masked_fill_(enough, 0)
    reset(state.statistics, enough)


def _blend(
    average: torch.Tensor,
    score: torch.Tensor,
    enough: torch.Tensor,
    known: torch.Tensor,
    ema: float,
) -> None:
    blended = torch.where(known, ema * average + (1 - ema) * score, score)
    average.copy_(torch.where(enough, blended, average))


def _block_scores(
    state: SiteState, stats: ChannelStatistics, covered: torch.Tensor, options: CompensationOptions
) -> torch.Tensor:
    if options.rac_statistic == "residual":
        return stats.served_energy / covered.clamp(min=1).unsqueeze(1)
    channels = _channel_scores(stats, options.rac_statistic)
    cold = torch.where(hot_mask(state.selection, state.site.width), 0, channels)
    return cold.unflatten(1, (-1, BLOCK_SIZE)).sum(dim=2)


def _channel_scores(stats: ChannelStatistics, statistic: str) -> torch.Tensor:
    if statistic == "variance":
        return stats.variance
    if statistic == "second_moment":
        return stats.second_moment
    return stats.channel_energy / stats.count.clamp(min=1).unsqueeze(1)


def _block_counts(
    states: Sequence[SiteState], options: CompensationOptions, rows: Mapping[str, int] | None
) -> list[int]:
    """Blocks per list of each site."""
    counts = [block_count(options.ratio(s.site.kind), s.site.width) for s in states]
    if not options.adaptive:
        return counts
    # Inputs that ranks share need equal counts on all of them: those they do not share stay apart.
    pools: dict[tuple[str, bool], list[int]] = {}
    for i, state in enumerate(states):
        if options.ratio(state.site.kind) and bool(state.averages.ready.any()):
            pools.setdefault((state.site.kind, state.site.shards > 1), []).append(i)
    for pool in pools.values():
        scores = [_ready_scores(states[i].averages) for i in pool]
        costs = None if rows is None else [rows[states[i].site.name] for i in pool]
        found = allocate_blocks(scores, [counts[i] for i in pool], costs)
        for i, count in zip(pool, found, strict=True):
            counts[i] = count
    return counts


def _ready_scores(averages: Averages) -> torch.Tensor:
    return averages.block[averages.ready]


def _select(state: SiteState, blocks: int, measured: _Measured, in_force: bool) -> SiteMetrics:
    """Write the lists and report."""
    site, averages, selection = state.site, state.averages, state.selection
    not_ready = ~averages.ready.unsqueeze(1)
    old_blocks, old_hot = selection.block_mask.clone(), hot_mask(selection, site.width)
    hot = torch.zeros_like(old_hot)
    if averages.channel.shape[1]:
        hot = top_mask(averages.channel, selection.channels.shape[1]) & ~not_ready
    moved = (hot != old_hot).unflatten(1, (-1, BLOCK_SIZE)).any(dim=2)
    averages.block_known.logical_and_(~moved)
    if in_force:
        forget_served(state, moved.any(dim=1))
    every_block = not_ready & (blocks > 0)
    write_selection(selection, top_mask(averages.block, blocks) | every_block, hot)
    return SiteMetrics(
        site.name,
        measured.before,
        measured.after,
        measured.signal,
        measured.underflow_share,
        blocks_selected=float(selection.block_mask.double().mean()),
        channels_selected=float(hot.double().mean()),
        blocks_overlap=jaccard(old_blocks, selection.block_mask),
        channels_overlap=jaccard(old_hot, hot),
        tokens=measured.tokens,
        refreshes=int(averages.refreshes),
        groups_ready=float(averages.ready.double().mean()),
    )
