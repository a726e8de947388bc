"""Counting a forward's rows while serving: sample, quantize as served, update the statistics."""

import torch

from quads_common.compensation.operands import InputCompensation, row_energies
from quads_common.compensation.sampling import sampled_rows
from quads_common.compensation.statistics import ChannelStatistics, update

__all__ = ["observe"]


def observe(
    stats: ChannelStatistics,
    x: torch.Tensor,
    served: InputCompensation,
    period: int,
    *,
    row_mask: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
) -> None:
    """Count one of ``period`` real tokens, in place; no host synchronization, no atomics.

    x: [T, K], or [T, k, K] with a row for each of a token's experts. served: the compensation that
        is in force. row_mask: [T] bool on the device, True for real tokens; None: all are real.
    expert_ids: [T, k] local experts, the group of each row; others (-1) count nowhere.
    """
    counted = stats.enabled.expand(x.shape[0])
    if row_mask is not None:
        counted = counted & row_mask
    tokens, used = sampled_rows(stats.offered, counted, period)
    rows = x[tokens]  # [S, K] or [S, k, K]
    group = None
    if expert_ids is not None:
        experts = expert_ids[tokens]
        used = used.unsqueeze(1).expand_as(experts).flatten()
        group, rows = experts.flatten(), rows.flatten(0, 1)
    channels = served.channels
    if channels is not None:
        lists = torch.zeros_like(used).long() if group is None else group.long()
        channels = channels[lists.clamp(0, channels.shape[0] - 1)]
    per_channel = stats.channel_energy.shape[1] > 0
    energies = row_energies(rows, channels, served.alpha, per_channel)
    update(stats, rows, energies, used, group)
