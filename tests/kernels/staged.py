"""Rows that layers keep for the statistics: buffers for comparisons, and what they must hold."""

import torch

from quads_common.compensation.moe import Gathering
from quads_common.compensation.staging import Staging, new_staging

__all__ = ["new_gathering", "staged_as"]

PLACES = 7
EMPTY = 7.0


def new_gathering(
    tokens: int, top_k: int, widths: tuple[int, int], dtype: torch.dtype, device: str
) -> Gathering:
    """For both inputs of a layer: every second token from the last on, their places mixed."""
    sample_map = torch.full((tokens,), -1, dtype=torch.int32)
    for i, token in enumerate(range(tokens - 1, -1, -2)[:PLACES]):
        sample_map[token] = (3 * i + 1) % PLACES
    sample_map = sample_map.to(device)
    both = []
    for k, width in zip((1, top_k), widths, strict=True):
        rows, groups = new_staging(PLACES, k, width, dtype, device)
        both.append(Staging(sample_map, rows.fill_(EMPTY), groups))
    return Gathering(*both)


def staged_as(
    staging: Staging, x: torch.Tensor, ids: torch.Tensor | None = None
) -> tuple[bool, str]:
    """Whether the sampled rows of x [T, K], or [T, k, K] with local experts [T, k], are kept, and
    nothing else."""
    x = x.cpu()
    rows = torch.full(staging.rows.shape, EMPTY, dtype=x.dtype)
    groups = torch.full(staging.groups.shape, -1, dtype=torch.int32)
    for token, place in enumerate(staging.sample_map.tolist()):
        if place < 0:
            continue
        if ids is None:
            rows[place], groups[place] = x[token], 0
            continue
        for k, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                at = place * ids.shape[1] + k
                rows[at], groups[at] = x[token, k], expert
    got = staging.rows.cpu()
    wrong = int((staging.groups.cpu() != groups).sum())
    same = (got == rows) | (got.isnan() & rows.isnan())
    return wrong == 0 and bool(same.all()), f"{wrong} groups, {int((~same).sum())} values differ"
