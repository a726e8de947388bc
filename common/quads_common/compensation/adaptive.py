"""A RAC ratio for each layer under one total cost: blocks go where they remove most energy.

Cost is counted in blocks. A block of every site of one kind costs the same multiplications, so
sites are pooled by kind: with unequal ratios the total of each kind is that of the common ratio.
Energies are those of the statistics, per token, so a layer with larger residuals gets more blocks.
"""

from collections.abc import Sequence

import torch

__all__ = ["allocate_blocks"]


def allocate_blocks(scores: Sequence[torch.Tensor], counts: Sequence[int]) -> list[int]:
    """Blocks per list for each site, in total ``sum(counts)``, at least 1 for each site.

    scores: per site [G, K/16] energy of each block and list. A site's n-th block is worth the mean
        over its lists of the n-th largest energy, which falls with n: the greedy choice is optimal.
        Of equal worth, the earlier site goes first. counts: blocks of each site at the common
        ratio, at least 1. Synchronizes with the host.
    """
    if not scores:
        return []
    worth = [s.double().sort(dim=1, descending=True).values.mean(dim=0).cpu() for s in scores]
    owner = torch.cat([torch.full((len(w) - 1,), i) for i, w in enumerate(worth)])
    remaining = torch.cat([w[1:] for w in worth])  # every site has its first block
    order = remaining.argsort(descending=True, stable=True)[: sum(counts) - len(scores)]
    extra = torch.bincount(owner[order], minlength=len(scores))
    return [1 + int(n) for n in extra]
