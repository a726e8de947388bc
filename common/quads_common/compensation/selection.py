"""Which blocks get their residual and which channels are spliced: counts, ranking, fixed buffers.

Ranking is deterministic: the highest score first, of equal scores the lowest index. Lists are kept
in ascending order and written in place, so a refresh changes no address and no captured graph.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_HALF_UP, Decimal
from itertools import islice

import torch

from quads_common.compensation.operands import InputCompensation, channel_bits, channel_mask
from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.site import Site
from quads_common.format import BLOCK_SIZE

__all__ = [
    "DERIVED",
    "Selection",
    "ascending_ids",
    "block_count",
    "channel_count",
    "checksums",
    "derived_buffers",
    "hot_mask",
    "jaccard",
    "new_selection",
    "top_mask",
    "write_selection",
]

_CHANNEL_MULTIPLE = 16
# Buffers that follow from the others: no file holds them.
DERIVED = ("block_mask", "hot_bits")


@dataclass(frozen=True)
class Selection:
    """Buffers of G lists, changed in place only. Ids are those of this rank's channels.

    blocks: [G, K/16] int32 selected blocks, ascending, then -1. block_mask: [G, K/16] bool, the
        same. channels: [G, C] int32 hot channels, ascending, then -1; C is 0 without splice.
    hot_bits: [G, K/16] int32, the same as ``channel_bits``, so that no forward makes them.
    """

    blocks: torch.Tensor
    block_mask: torch.Tensor
    channels: torch.Tensor
    hot_bits: torch.Tensor

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def compensation(
        self, options: CompensationOptions, kind: str, columns: torch.Tensor | None = None
    ) -> InputCompensation:
        """What the layers take. columns: BF16 columns, with ``splice_weight="bf16"`` only."""
        splice = self.channels.shape[1] > 0
        return InputCompensation(
            self.block_mask if options.ratio(kind) > 0 else None,
            self.channels if splice else None,
            columns,
            options.rac_alpha,
            self.hot_bits if splice else None,
        )


def checksums(selections: Sequence[Selection]) -> list[str]:
    """Digests of the lists of each, to compare ranks by. Synchronizes with the host, once."""
    lists = [t for selection in selections for t in (selection.blocks, selection.channels)]
    if not lists:
        return []
    values = iter(torch.cat([t.flatten() for t in lists]).tolist())
    texts = [repr(list(islice(values, t.numel()))) for t in lists]
    pairs = zip(texts[::2], texts[1::2], strict=True)
    return [hashlib.sha256("".join(pair).encode()).hexdigest()[:16] for pair in pairs]


def block_count(ratio: float, width: int) -> int:
    """Blocks of a rank: ratio * K_local / 16 rounded half up; at least 1 unless the ratio is 0."""
    if ratio == 0:
        return 0
    exact = Decimal(str(ratio)) * (width // BLOCK_SIZE)
    return max(1, int(exact.to_integral_value(ROUND_HALF_UP)))


def channel_count(count: int, shards: int, width: int) -> int:
    """Channels of a rank: ceil(count / shards / 16) * 16, at most K_local.

    shards: ranks that share the input's channels, the TP size for w2, 1 where each has all.
    """
    share = -(-count // (shards * _CHANNEL_MULTIPLE)) * _CHANNEL_MULTIPLE
    return min(share, width)


def new_selection(
    site: Site, options: CompensationOptions, device: torch.device | str = "cpu"
) -> Selection:
    """The selection before any statistics: every block (none if RAC is off), no channel."""
    groups = len(site.groups)
    slots = channel_count(options.splice_count(site.kind), site.shards, site.width)
    mask = torch.full((groups, site.blocks), options.ratio(site.kind) > 0, device=device)
    return Selection(
        ascending_ids(mask, site.blocks),
        mask,
        torch.full((groups, slots), -1, dtype=torch.int32, device=device),
        torch.zeros((groups, site.blocks), dtype=torch.int32, device=device),
    )


def top_mask(scores: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
    """[G, n] bool: the ``count`` highest scores of each row, of equal ones the lowest index.

    count: for all rows, or [G, 1].
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    first = torch.arange(scores.shape[1], device=scores.device) < count
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, first.expand_as(order))


def ascending_ids(mask: torch.Tensor, slots: int) -> torch.Tensor:
    """[G, slots] int32: the places where ``mask`` [G, n] is set, ascending, then -1."""
    width = mask.shape[1]
    ids = torch.where(mask, torch.arange(width, device=mask.device), width).sort(dim=1).values
    return torch.where(ids < width, ids, -1)[:, :slots].int()


def write_selection(
    selection: Selection, block_mask: torch.Tensor, hot_channels: torch.Tensor
) -> None:
    """Write masks [G, K/16] and [G, K] into the buffers, in place."""
    selection.blocks.copy_(ascending_ids(block_mask, block_mask.shape[1]))
    selection.channels.copy_(ascending_ids(hot_channels, selection.channels.shape[1]))
    derived = derived_buffers(selection.blocks, selection.channels)
    selection.block_mask.copy_(derived["block_mask"])
    selection.hot_bits.copy_(derived["hot_bits"])


def derived_buffers(blocks: torch.Tensor, channels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The buffers named by ``DERIVED`` of lists [G, K/16] and [G, C]."""
    count = blocks.shape[1]
    return {
        "block_mask": channel_mask(blocks, count),
        "hot_bits": channel_bits(channels, count * BLOCK_SIZE),
    }


def jaccard(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[S] float64: |a and b| / |a or b| by rows of two bool masks [S, n]; 1 if both are empty."""
    union = (a | b).sum(dim=1)
    return torch.where(union > 0, (a & b).sum(dim=1).double() / union, 1.0)


def hot_mask(selection: Selection, width: int) -> torch.Tensor:
    """[G, K] bool of the selected channels."""
    return channel_mask(selection.channels, width)
