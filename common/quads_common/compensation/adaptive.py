"""A RAC ratio for each layer under one total cost: blocks go where they remove most energy.

Cost is counted in multiplications: a block of a site costs 16 for each row of its weight. Sites are
pooled by kind: with unequal ratios the total of each kind is at most that of the common ratio.
Energies are those of the statistics, per token, so a layer with larger residuals gets more blocks.
"""

from collections.abc import Sequence

import torch

__all__ = ["allocate_blocks"]


def allocate_blocks(
    scores: Sequence[torch.Tensor], counts: Sequence[int], costs: Sequence[int] | None = None
) -> list[int]:
    """Blocks per list for each site, at least 1 for each, at most ``sum(counts * costs)`` in cost.

    scores: per site [G, K/16] energy of each block and list. A site's n-th block is worth the mean
        over its lists of the n-th largest energy, which falls with n. Blocks are taken in order of
        worth for their cost as long as they fit; of equal ones, the earlier site goes first. With
        equal costs that is optimal and the total is ``sum(counts)``, as far as there are blocks.
    counts: blocks of each site at the common ratio, at least 1. costs: of a block of each site,
        positive; None: equal. Synchronizes with the host.
    """
    costs = [1] * len(scores) if costs is None else costs
    worth = [s.double().sort(dim=1, descending=True).values.mean(dim=0).tolist() for s in scores]
    left = sum(n * cost for n, cost in zip(counts, costs, strict=True)) - sum(costs)
    taken = [1] * len(scores)  # every site has its first block
    offers = [
        (-value / cost, site)
        for site, (values, cost) in enumerate(zip(worth, costs, strict=True))
        for value in values[1:]
    ]
    for _, site in sorted(offers):
        if costs[site] <= left:
            left -= costs[site]
            taken[site] += 1
    return taken
