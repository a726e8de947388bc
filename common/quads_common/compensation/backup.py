"""What a calibration starts from, kept on the host, so that one that fails changes nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quads_common.compensation.metrics import SiteMetrics
from quads_common.compensation.state import SiteState, forget_served

__all__ = ["Backup", "bring_back", "take_backup"]

_LISTS = "selection_"
_NEVER_BACK = ("statistics_offered",)  # tokens that came by did so


@dataclass(frozen=True)
class Backup:
    """Of all sites. buffers: by site and name, on the CPU. metrics: of the last refresh.

    last_known: those that stand in where nothing new is measured, by site.
    chosen: lists that wait for a sync, if any; chosen_differ: whether they are new.
    """

    buffers: dict[str, dict[str, torch.Tensor]]
    metrics: list[SiteMetrics]
    last_known: dict[str, SiteMetrics]
    chosen: list[dict[str, torch.Tensor]] | None
    chosen_differ: bool


def take_backup(
    states: Sequence[SiteState],
    metrics: list[SiteMetrics],
    last_known: dict[str, SiteMetrics],
    chosen: list[dict[str, torch.Tensor]] | None,
    chosen_differ: bool,
) -> Backup:
    """Copy every buffer to the CPU."""
    buffers = {
        state.site.name: {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in state.buffers().items()
            if name not in _NEVER_BACK
        }
        for state in states
    }
    return Backup(buffers, metrics, last_known, chosen, chosen_differ)


def bring_back(backup: Backup, states: Sequence[SiteState], *, lists: bool) -> bool:
    """Write the copies into the buffers, in place; returns whether a list changed.

    lists: the lists in force too. If they must stay, energies of what other hot channels left are
    forgotten.
    """
    changed = False
    for state in states:
        old = backup.buffers[state.site.name]
        for name, tensor in state.buffers().items():
            if name not in old or (name.startswith(_LISTS) and not lists):
                continue
            source = old[name].to(tensor.device)
            changed |= name.startswith(_LISTS) and not torch.equal(tensor, source)
            tensor.copy_(source)
        if not lists:
            before = old["selection_channels"].to(state.device)
            forget_served(state, (before != state.selection.channels).any(dim=1))
    return changed
