"""Inputs of the compensation kernels' comparisons: lists of every kind, rows with edges."""

from dataclasses import dataclass, replace

import torch

from quads_common.compensation.operands import InputCompensation, channel_bits
from quads_common.weight_tiles import TileLayout


@dataclass(frozen=True)
class Preset:
    """What is compensated: share of blocks (None: no RAC), channels (0: none), their columns."""

    ratio: float | None = None
    channels: int = 0
    columns: bool = False
    alpha: float = 1.0

    def lists(self, width: int, groups: int, rows: int, device: str) -> InputCompensation:
        """Random lists; rows: of the weight. Some lists have -1, the last of several has no channel
        and no block."""
        generator = torch.Generator().manual_seed(31)
        mask = channels = columns = None
        if self.ratio is not None:
            mask = torch.rand((groups, width // 16), generator=generator) < self.ratio
        if self.channels:
            count = min(self.channels, width)
            order = [torch.randperm(width, generator=generator)[:count] for _ in range(groups)]
            channels = torch.stack(order).int()
            channels[0, -1] = -1
        if groups > 1:
            for tensor, nothing in ((mask, False), (channels, -1)):
                if tensor is not None:
                    tensor[-1] = nothing
        if self.columns:
            columns = torch.randn((groups, rows, count), generator=generator).to(torch.bfloat16)
        bits = None if channels is None else channel_bits(channels, width)
        return moved(InputCompensation(mask, channels, columns, self.alpha, bits), device)


def tile_columns(lists: InputCompensation, layout: TileLayout) -> InputCompensation:
    """The same, for a weight of this layout."""
    if lists.columns is None:
        return lists
    return replace(lists, columns=layout.tile_columns(lists.columns))


PRESETS = {
    "rac": Preset(0.5),
    "rac all, alpha": Preset(1.0, alpha=0.5),
    "splice": Preset(channels=32),
    "splice rac": Preset(0.5, 32),
    "columns": Preset(channels=32, columns=True),
    "columns rac": Preset(0.5, 20, True),
}


def hot_rows(rows: int, width: int, generator: torch.Generator, dtype: torch.dtype):
    """Rows with outliers, a hot channel that is far larger than the rest, zeros and tiny values."""
    x = torch.randn((rows, width), generator=generator)
    x *= torch.where(torch.rand(width, generator=generator) < 0.05, 50.0, 1.0)
    if rows > 3:
        x[0] *= 1e-6
        x[1, 0] = 3e4
        x[2] = 0
        x[3, 5] = -0.0
    return x.to(dtype)


def enlarge_hot(x: torch.Tensor, lists: torch.Tensor, of_row: torch.Tensor) -> None:
    """Make the hot channels of a row 1 to 1e28 times as large, so that the folded form shifts them.

    lists: [L, C], of_row: [rows] the list of each row.
    """
    largest = 1e4 if x.dtype == torch.float16 else 1e30
    for row, channels in enumerate(lists[of_row]):
        hot = channels[channels >= 0].long()
        value = x[row, hot].float() * 10.0 ** (4 * (row % 8))
        x[row, hot] = value.clamp(-largest, largest).to(x.dtype)


def moved(lists: InputCompensation, device: str) -> InputCompensation:
    """Copies on a device."""
    tensors = {
        name: value.to(device)
        for name, value in vars(lists).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(lists, **tensors)
