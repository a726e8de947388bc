"""Inputs of the compensation tests."""

import torch

from quads_common.compensation import InputCompensation
from tests.common.samples import normal


def with_outliers(
    rows: int, width: int, hot: list[int], factor: float = 30.0, dtype=torch.bfloat16
):
    """[rows, width] normal values, the hot channels ``factor`` times as large."""
    x = normal(rows, width, seed=5, dtype=torch.float32)
    x[:, hot] *= factor
    return x.to(dtype)


def block_mask(blocks: list[int], width: int) -> torch.Tensor:
    """[1, width/16] bool."""
    mask = torch.zeros(1, width // 16, dtype=torch.bool)
    mask[0, blocks] = True
    return mask


def channel_list(hot: list[int], slots: int | None = None) -> torch.Tensor:
    """[1, slots] int32, ascending, then -1."""
    padding = [-1] * ((slots or len(hot)) - len(hot))
    return torch.tensor([sorted(hot) + padding], dtype=torch.int32)


def compensation(
    width: int,
    blocks: list[int] | None = None,
    hot: list[int] | None = None,
    slots: int | None = None,
    columns: torch.Tensor | None = None,
    alpha: float = 1.0,
) -> InputCompensation:
    """One group's lists from plain Python ones."""
    return InputCompensation(
        None if blocks is None else block_mask(blocks, width),
        None if hot is None else channel_list(hot, slots),
        columns,
        alpha,
    )
