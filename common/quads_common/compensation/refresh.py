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

from collections.abc import Mapping, Sequence

import torch

from quads_common.compensation.adaptive import allocate_blocks
from quads_common.compensation.metrics import SiteMetrics, site_metrics
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.selection import (
    block_count,
    hot_mask,
    jaccard,
    top_mask,
    write_selection,
)
from quads_common.compensation.state import (
    Averages,
    SiteState,
    batches_of,
    forget_served,
    gather,
    give_back,
)
from quads_common.compensation.statistics import ChannelStatistics, reset
from quads_common.format import BLOCK_SIZE

__all__ = ["refresh", "refresh_is_due"]


def refresh_is_due(boundary: int, options: CompensationOptions) -> bool:
    """Whether the boundary with this number, counted from 1, refreshes the selection."""
    return boundary % options.refresh_interval == 0


def refresh(
    states: Sequence[SiteState],
    options: CompensationOptions,
    *,
    in_force: bool = True,
    rows: Mapping[str, int] | None = None,
) -> list[SiteMetrics]:
    """Choose the lists of all sites anew, in place. Not for inside a forward.

    in_force: rows are served with the new lists from now on; else the caller takes them away, and
        calls ``forget_served`` when they come into force.
    rows: of the weight that a site's input is multiplied with, by name: what a block costs with
        ``adaptive``. None: the same for all.

    Launches and waits do not grow with the number of sites: those of one shape are looked at
    together, and the host waits once for the metrics of all.
    """
    batches = batches_of(states)
    measured = []
    for batch in batches:
        together = gather(batch)
        measured.append(_measure(together, len(batch), options))
        _absorb(together, options)
        give_back(batch, together)
    counts = _block_counts(states, options, rows)
    chosen = []
    for batch in batches:
        together = gather(batch)
        blocks = torch.tensor([counts[s.site.name] for s in batch], device=together.device)
        chosen.append(_select(together, blocks, in_force))
        give_back(batch, together)
    found = [torch.cat(pair, dim=1) for pair in zip(measured, chosen, strict=True)]
    values = torch.cat(found).tolist() if found else []
    names = [state.site.name for batch in batches for state in batch]
    metrics = {name: site_metrics(name, *row) for name, row in zip(names, values, strict=True)}
    return [metrics[state.site.name] for state in states]


def _measure(together: SiteState, sites: int, options: CompensationOptions) -> torch.Tensor:
    """What was served since the last refresh, with the selection in force: [sites, 5] float64 of
    ``SiteMetrics``: both residual energies, signal, lost residuals, tokens."""
    stats, averages = together.statistics, together.averages

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.double().reshape(sites, -1).sum(dim=1)

    def mean(values: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
        return torch.where(counted > 0, total(values) / counted, torch.nan)

    covered = _covered(together)
    rows, under_lists = total(stats.count), total(covered)
    chosen = together.selection.block_mask & (options.ratio(together.site.kind) > 0)
    pairs = total(chosen.sum(dim=1) * covered).clamp(min=1)
    lost = total(torch.where(chosen, stats.underflows, 0)) / pairs
    return torch.stack(
        [
            mean(stats.plain_energy, rows),
            mean(torch.where(chosen, stats.left_energy, stats.served_energy), under_lists),
            mean(stats.second_moment * stats.count.unsqueeze(1), rows),
            torch.where(under_lists > 0, lost, torch.nan),
            rows + total(averages.tokens),
        ],
        dim=1,
    )


def _covered(state: SiteState) -> torch.Tensor:
    """[G] rows in the energies that depend on the hot channels."""
    return state.statistics.count - state.averages.uncovered


def _absorb(state: SiteState, options: CompensationOptions) -> None:
    """Average the scores of lists that have enough rows, and start counting them from zero."""
    averages, stats, covered = state.averages, state.statistics, _covered(state)
    ranked_by_served = options.ratio(state.site.kind) > 0 and options.rac_statistic == "residual"
    enough = (covered if ranked_by_served else stats.count) >= options.min_tokens
    known, per_list = averages.block_known, enough.unsqueeze(1)
    scores = _block_scores(state, covered, options)
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
    reset(stats, enough)


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
    state: SiteState, covered: torch.Tensor, options: CompensationOptions
) -> torch.Tensor:
    stats = state.statistics
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
) -> dict[str, int]:
    """Blocks per list of each site, by name."""
    counts = {s.site.name: block_count(options.ratio(s.site.kind), s.site.width) for s in states}
    if not options.adaptive:
        return counts
    # Inputs that ranks share need equal counts on all of them: those they do not share stay apart.
    pools: dict[tuple[str, bool], list[SiteState]] = {}
    for state in states:
        if options.ratio(state.site.kind) and bool(state.averages.ready.any()):
            pools.setdefault((state.site.kind, state.site.shards > 1), []).append(state)
    for pool in pools.values():
        names = [state.site.name for state in pool]
        scores = [_ready_scores(state.averages) for state in pool]
        costs = None if rows is None else [rows[name] for name in names]
        counts |= zip(
            names, allocate_blocks(scores, [counts[n] for n in names], costs), strict=True
        )
    return counts


def _ready_scores(averages: Averages) -> torch.Tensor:
    return averages.block[averages.ready]


def _select(together: SiteState, blocks: torch.Tensor, in_force: bool) -> torch.Tensor:
    """Write the lists; blocks: [sites] of each of a site's lists.

    Returns [sites, 6] float64 of ``SiteMetrics``: shares selected, overlaps, refreshes, lists
    ready.
    """
    sites, width = len(blocks), together.site.width
    averages, selection = together.averages, together.selection
    not_ready = ~averages.ready.unsqueeze(1)
    old_blocks, old_hot = selection.block_mask.clone(), hot_mask(selection, width)
    hot = torch.zeros_like(old_hot)
    if averages.channel.shape[1]:
        hot = top_mask(averages.channel, selection.channels.shape[1]) & ~not_ready
    moved = (hot != old_hot).unflatten(1, (-1, BLOCK_SIZE)).any(dim=2)
    averages.block_known.logical_and_(~moved)
    if in_force:
        forget_served(together, moved.any(dim=1))
    per_list = blocks.repeat_interleave(len(not_ready) // sites).unsqueeze(1)
    every_block = not_ready & (per_list > 0)
    write_selection(selection, top_mask(averages.block, per_list) | every_block, hot)

    def share(mask: torch.Tensor) -> torch.Tensor:
        return mask.double().reshape(sites, -1).mean(dim=1)

    return torch.stack(
        [
            share(selection.block_mask),
            share(hot),
            jaccard(old_blocks.reshape(sites, -1), selection.block_mask.reshape(sites, -1)),
            jaccard(old_hot.reshape(sites, -1), hot.reshape(sites, -1)),
            averages.refreshes.double(),
            share(averages.ready),
        ],
        dim=1,
    )
