"""All buffers of a site, and those of several sites together."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from quads_common.compensation.options import CompensationOptions
from quads_common.compensation.selection import Selection, new_selection
from quads_common.compensation.site import Site
from quads_common.compensation.statistics import ChannelStatistics, new_statistics

__all__ = [
    "Averages",
    "SiteState",
    "batches_of",
    "clones",
    "forget_served",
    "gather",
    "give_back",
    "lists_that_differ",
    "new_site_state",
    "with_lists",
]

# Elements of one statistics buffer (8 bytes each) of all sites that are looked at together.
MOST_TOGETHER = 2**23


@dataclass(frozen=True)
class Averages:
    """Buffers of G lists, changed in place only.

    block: [G, K/16] float64 averaged score; block_known: [G, K/16] bool, it belongs to the hot
        channels in force. channel: [G, K] float64, or [G, 0] without splice.
    ready: [G] bool, the list has an average. tokens: [G] float64 rows in all averages so far.
    uncovered: [G] float64, rows in the statistics' count that ``served_energy``, ``left_energy``
        and ``underflows`` lack, see ``forget_served``.
    refreshes: [1] int64.
    """

    block: torch.Tensor
    block_known: torch.Tensor
    channel: torch.Tensor
    ready: torch.Tensor
    uncovered: torch.Tensor
    tokens: torch.Tensor
    refreshes: torch.Tensor

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by field name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class SiteState:
    """All buffers of a site; an engine registers them so that sleep and reload keep them."""

    site: Site
    statistics: ChannelStatistics
    averages: Averages
    selection: Selection

    @property
    def device(self) -> torch.device:
        """Of all buffers."""
        return self.selection.block_mask.device

    def buffers(self) -> dict[str, torch.Tensor]:
        """Every tensor by a name that a module accepts for a buffer."""
        parts = {
            "statistics": self.statistics.buffers(),
            "averages": self.averages.buffers(),
            "selection": self.selection.buffers(),
        }
        return {f"{part}_{name}": t for part, found in parts.items() for name, t in found.items()}


def new_site_state(
    site: Site, options: CompensationOptions, device: torch.device | str = "cpu"
) -> SiteState:
    """Empty buffers: nothing counted, every block and no channel selected."""
    groups = len(site.groups)
    selection = new_selection(site, options, device)
    splice = selection.channels.shape[1] > 0

    def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    statistics = new_statistics(
        groups,
        site.width,
        device=device,
        channel_energy=splice and options.splice_statistic == "residual",
    )
    averages = Averages(
        block=zeros(groups, site.blocks),
        block_known=zeros(groups, site.blocks, dtype=torch.bool),
        channel=zeros(groups, site.width if splice else 0),
        ready=zeros(groups, dtype=torch.bool),
        uncovered=zeros(groups),
        tokens=zeros(groups),
        refreshes=zeros(1, dtype=torch.int64),
    )
    return SiteState(site, statistics, averages, selection)


def forget_served(state: SiteState, lists: torch.Tensor) -> None:
    """The hot channels of some ``lists`` ([G] bool) change: energies of what they leave, anew."""
    for tensor in (
        state.statistics.served_energy,
        state.statistics.left_energy,
        state.statistics.underflows,
    ):
        tensor.masked_fill_(lists.unsqueeze(1), 0)
    uncovered = state.averages.uncovered
    uncovered.copy_(torch.where(lists, state.statistics.count, uncovered))


def lists_that_differ(channels: torch.Tensor, state: SiteState) -> torch.Tensor:
    """[G] bool: other hot channels than those in force."""
    return (channels != state.selection.channels).any(dim=1)


def clones(buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies by name."""
    return {name: tensor.clone() for name, tensor in buffers.items()}


def with_lists(state: SiteState, lists: dict[str, torch.Tensor]) -> SiteState:
    """A copy as it would be if these lists (``Selection.buffers``) were in force."""
    copy = SiteState(
        state.site,
        ChannelStatistics(**clones(state.statistics.buffers())),
        Averages(**clones(state.averages.buffers())),
        Selection(**lists),
    )
    forget_served(copy, lists_that_differ(lists["channels"], state))
    return copy


def batches_of(states: Sequence[SiteState]) -> list[list[SiteState]]:
    """Sites of the same kind and shapes."""
    alike: dict[tuple, list[SiteState]] = {}
    for state in states:
        shapes = tuple(tuple(tensor.shape) for tensor in state.buffers().values())
        alike.setdefault((state.site.kind, state.device, *shapes), []).append(state)
    found = []
    for together in alike.values():
        most = max(1, MOST_TOGETHER // together[0].statistics.mean.numel())
        found += [together[i : i + most] for i in range(0, len(together), most)]
    return found


def gather(batch: Sequence[SiteState]) -> SiteState:
    """Copies: the lists of all sites one after the other, under the first one's site."""

    def joined(parts: list[Any]) -> Any:
        buffers = zip(*(part.buffers().values() for part in parts), strict=True)
        return type(parts[0])(*(torch.cat(tensors) for tensors in buffers))

    return SiteState(
        batch[0].site,
        joined([state.statistics for state in batch]),
        joined([state.averages for state in batch]),
        joined([state.selection for state in batch]),
    )


def give_back(batch: Sequence[SiteState], together: SiteState) -> None:
    """What ``gather`` copied, to the sites' own buffers."""
    copies = [t.chunk(len(batch)) for t in together.buffers().values() if t.numel()]
    own = [[t for t in state.buffers().values() if t.numel()] for state in batch]
    alike: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for targets, sources in zip(zip(*own, strict=True), copies, strict=True):
        into, of = alike.setdefault(sources[0].dtype, ([], []))
        into += targets
        of += sources
    for into, of in alike.values():
        torch._foreach_copy_(into, of)
