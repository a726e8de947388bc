"""Which rows are counted: of every ``period`` real rows in order of arrival exactly one.

Which one is drawn from a hash of the window's number, so a sequence that always has the same place
in the batch is not favoured. How rows are spread over forwards makes no difference. All on the
device, with shapes that depend on shapes only.
"""

import torch

__all__ = ["sampled_rows"]

# Odd constants of splitmix64, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX = 0xBF58476D1CE4E5B9 - 2**64


def sampled_rows(
    offered: torch.Tensor, counted: torch.Tensor, period: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of the sampled rows among those of a forward, and which of the places are used.

    offered: [1] int64, real rows so far; advanced in place. counted: [M] bool, the real rows.
    Returns rows [S] int64 (in range also where unused) and used [S] bool, S = about M / period + 1.
    """
    total = counted.shape[0]
    if total == 0:
        empty = torch.zeros(0, dtype=torch.int64, device=counted.device)
        return empty, empty.bool()
    arrived = counted.long().cumsum(0)
    ordinal = offered + arrived - 1
    window = torch.div(ordinal, period, rounding_mode="floor")
    take = counted & (ordinal - window * period == _pick(window, period))
    taken = take.long().cumsum(0)
    # M consecutive ordinals touch at most so many windows.
    slots = min(total, (total - 2 + period) // period + 1)
    # The i-th taken row is the first one at which i were taken; M if there is none.
    rows = torch.searchsorted(taken, torch.arange(1, slots + 1, device=counted.device))
    offered.add_(arrived[-1:])
    return rows.clamp(max=total - 1), rows < total


def _pick(window: torch.Tensor, period: int) -> torch.Tensor:
    """The offset within each window, 0..period-1."""
    mixed = window * _GOLDEN
    mixed = (mixed ^ (mixed >> 32)) * _MIX
    return ((mixed >> 33) & 0x7FFFFFFF) % period
