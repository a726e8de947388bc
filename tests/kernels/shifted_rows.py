"""Rows whose hot channels are so much larger than the rest that ``fold`` shifts them furthest."""

import torch

from quads_common.compensation.fold import fold
from quads_common.compensation.operands import InputCompensation, compensated_operands

# Of each row's cold channels, the largest magnitude.
COLD = (30.0, 14.0, 7.0, 3.0, 1.7, 0.9, 0.4, 1e-2)


def shifted_rows(width: int, lists: InputCompensation) -> torch.Tensor:
    """[8, width] bf16, of the first list of ``lists``, which has hot channels."""
    x = torch.randn((len(COLD), width), generator=torch.Generator().manual_seed(43))
    x = x.clamp(-1, 1)
    x[:, 0] = 1.0
    x *= torch.tensor(COLD)[:, None]
    hot = lists.channels[0][lists.channels[0] >= 0].long()
    x[:, hot] = torch.where(x[:, hot] < 0, -3e38, 3e38)
    return x.bfloat16()


def shifts_of(x: torch.Tensor, lists: InputCompensation) -> list[int]:
    """By how many powers of two ``fold`` scales each row."""
    operands = compensated_operands(x, lists)
    return torch.log2(fold(operands).row_scale / operands.row_scale).flatten().int().tolist()
