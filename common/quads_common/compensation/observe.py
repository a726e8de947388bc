"""Counting rows: quantize them as they are served, and update the statistics."""

import torch

from quads_common.compensation.operands import InputCompensation, row_energies
from quads_common.compensation.statistics import ChannelStatistics, update

__all__ = ["observe"]


def observe(
    stats: ChannelStatistics,
    x: torch.Tensor,
    served: InputCompensation,
    groups: torch.Tensor | None = None,
) -> None:
    """Count the rows x [R, K], in place; no host synchronization, no atomics.

    served: the compensation that is in force. groups: [R] integers, the list of each row; rows of
        others (-1) count nowhere. None: all are of the first.
    """
    channels = served.channels
    if channels is not None:
        lists = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        if groups is not None:
            lists = groups.long().clamp(0, channels.shape[0] - 1)
        channels = channels[lists]
    per_channel = stats.channel_energy.shape[1] > 0
    energies = row_energies(x, channels, served.alpha, per_channel)
    update(stats, x, energies, group=groups)
