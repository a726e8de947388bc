"""What a refresh reports of each site."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = ["HELP", "SiteMetrics", "refresh_summary", "site_metrics", "with_last_known"]

# What engines show of a site, by field of ``SiteMetrics``.
HELP = {
    "residual_energy_before": "Squares of x - Q(x) per token, without compensation",
    "residual_energy_after": "Squares of x - Q(x) per token, as served until the last refresh",
    "signal_energy": "Squares of x per token",
    "rac_scale_underflow_share": "Share of residual blocks whose scale rounded to 0",
    "blocks_selected": "Share of blocks with a residual",
    "channels_selected": "Share of channels that are not quantized",
    "blocks_overlap": "Jaccard index of the blocks with those before the last refresh",
    "channels_overlap": "Jaccard index of the channels with those before the last refresh",
    "tokens": "Rows counted so far",
    "refreshes": "Refreshes so far",
    "groups_ready": "Share of the lists that have seen min_tokens rows",
}


@dataclass(frozen=True)
class SiteMetrics:
    """One site at one refresh. Energies are NaN where ``refresh`` found no row to measure them by.

    residual_energy_before: per token, the squares of x - Q(x) without compensation.
    residual_energy_after: the same of what was served, with the selection in force until now.
    signal_energy: per token, the squares of x.
    rac_scale_underflow_share: of the pairs of token and selected block, those whose residual was
        lost because its block scale rounded to 0.
    blocks_selected, channels_selected: share of the new selection.
    blocks_overlap, channels_overlap: Jaccard index of the new selection and the one before.
    tokens: rows counted so far, all groups and refreshes. refreshes: including this one.
    groups_ready: share of the lists that had ``min_tokens`` rows and so chose for themselves.
    """

    name: str
    residual_energy_before: float
    residual_energy_after: float
    signal_energy: float
    rac_scale_underflow_share: float
    blocks_selected: float
    channels_selected: float
    blocks_overlap: float
    channels_overlap: float
    tokens: int
    refreshes: int
    groups_ready: float

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, for an RPC or a metrics exporter; None for NaN, which JSON lacks."""
        return {k: None if v != v else v for k, v in asdict(self).items()}


def site_metrics(
    name: str,
    before: float,
    after: float,
    signal: float,
    underflow_share: float,
    tokens: float,
    blocks_selected: float,
    channels_selected: float,
    blocks_overlap: float,
    channels_overlap: float,
    refreshes: float,
    groups_ready: float,
) -> SiteMetrics:
    """From the numbers that ``refresh`` computes on the device."""
    return SiteMetrics(
        name,
        before,
        after,
        signal,
        underflow_share,
        blocks_selected,
        channels_selected,
        blocks_overlap,
        channels_overlap,
        tokens=round(tokens),
        refreshes=round(refreshes),
        groups_ready=groups_ready,
    )


_MEASURED = (
    "residual_energy_before",
    "residual_energy_after",
    "signal_energy",
    "rac_scale_underflow_share",
)


def with_last_known(new: SiteMetrics, old: SiteMetrics | None) -> SiteMetrics:
    """``new`` with the values of ``old`` where nothing was measured since."""
    if old is None:
        return new
    gone = [key for key in _MEASURED if math.isnan(getattr(new, key))]
    return replace(new, **{key: getattr(old, key) for key in gone})


def refresh_summary(metrics: Sequence[SiteMetrics]) -> str:
    """One line for the log."""
    if not metrics:
        return "no compensated input"
    counted = [m for m in metrics if m.residual_energy_before > 0]
    remaining = [m.residual_energy_after / m.residual_energy_before for m in counted]
    share = f"{100 * sum(remaining) / len(remaining):.1f}%" if remaining else "unknown"
    overlap = sum(m.blocks_overlap for m in metrics) / len(metrics)
    ready = sum(m.groups_ready for m in metrics) / len(metrics)
    return (
        f"{len(metrics)} inputs, residual energy {share} of uncompensated, block overlap "
        f"{overlap:.3f}, {100 * ready:.1f}% of lists ready, "
        f"{max(m.tokens for m in metrics)} rows counted at most"
    )
