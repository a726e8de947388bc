"""Sampled rows that wait to be counted.

Counting a row costs far more than keeping it, and few forwards of a decode have a sampled row. So
an operator only keeps the sampled rows of its inputs, in buffers with fixed addresses, where a map
on the device says so: inside CUDA graphs that is a store which mostly does not happen.
``count_staged`` merges what was kept into the statistics, between two forwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads_common.compensation.observe import observe
from quads_common.compensation.operands import InputCompensation
from quads_common.compensation.statistics import ChannelStatistics

__all__ = ["StagedInput", "Staging", "count_staged", "new_staging", "stage"]


@dataclass(frozen=True)
class Staging:
    """Where an operator keeps the sampled rows of an input.

    sample_map: [T] int32, the place of each token of a forward, -1 for those that are not sampled.
    rows: [places * k, K]; k is 1, or for the input of w2 the number of experts of a token.
    groups: [places * k] int32, the list that each row belongs to (the local expert; else 0), -1
        where nothing is kept.
    """

    sample_map: torch.Tensor
    rows: torch.Tensor
    groups: torch.Tensor


@dataclass(frozen=True)
class StagedInput:
    """An input whose rows are kept: their statistics, the lists that serve them, and ``Staging``'s
    rows and groups."""

    statistics: ChannelStatistics
    served: InputCompensation
    rows: torch.Tensor
    groups: torch.Tensor


def new_staging(
    places: int, top_k: int, width: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty rows and groups; dtype: the model's."""
    rows = torch.zeros((places * top_k, width), dtype=dtype, device=device)
    return rows, torch.full((places * top_k,), -1, dtype=torch.int32, device=device)


def stage(staging: Staging, x: torch.Tensor, expert_ids: torch.Tensor | None = None) -> None:
    """Keep the sampled rows of x in their places, in place; no data-dependent shapes.

    x: [T, K], or [T, k, K] with a row for each of a token's experts. expert_ids: [T, k] local
        experts; rows of others (-1) are not kept.
    """
    if x.shape[0] == 0:
        return
    top_k = 1 if expert_ids is None else expert_ids.shape[1]
    places = torch.arange(staging.rows.shape[0] // top_k, device=x.device)
    here = staging.sample_map.unsqueeze(0) == places.unsqueeze(1)  # [places, T]
    token = here.int().argmax(dim=1)
    used = here.any(dim=1).repeat_interleave(top_k)
    group = torch.zeros_like(staging.groups)
    if expert_ids is not None:
        group = expert_ids[token].flatten().to(group.dtype)
        used = used & (group >= 0)
    kept = x[token].reshape(staging.rows.shape).to(staging.rows.dtype)
    staging.rows.copy_(torch.where(used.unsqueeze(1), kept, staging.rows))
    staging.groups.copy_(torch.where(used, group, staging.groups))


def count_staged(inputs: Sequence[StagedInput], offered: int) -> None:
    """Count the rows that are kept, and forget them, in place.

    offered: tokens that came by since the last time, sampled or not.
    """
    for staged in inputs:
        observe(staged.statistics, staged.rows, staged.served, staged.groups)
        staged.statistics.offered.add_(offered)
        staged.groups.fill_(-1)
