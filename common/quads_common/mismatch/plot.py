"""Plots of the log-prob gap; needs matplotlib (``pip install quads-nvfp4[plot]``)."""

from collections.abc import Mapping
from pathlib import Path

import torch

from quads_common.mismatch.report import gap_report
from quads_common.mismatch.statistics import TAIL_NATS, sequence_statistics

__all__ = ["plot_gaps"]


def plot_gaps(
    runs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    path: Path | str,
    *,
    tail_nats: float = TAIL_NATS,
) -> None:
    """Draw the gaps of several runs into an image file.

    runs: label -> (delta, mask), each [B, T]. Left: share of tokens whose gap exceeds x. Right:
    share of all tail tokens that the worst sequences hold; a straight line means that every
    sequence has its part, a steep rise that a few hold nearly all.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no runs, or one without a scored token.
    """
    if not runs:
        raise ValueError("plot_gaps needs at least one run")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    tokens, concentration = figure.subplots(1, 2)
    for label, (delta, mask) in runs.items():
        report = gap_report(delta, mask, tail_nats=tail_nats)
        if not report.tokens:
            raise ValueError(f"run {label!r} has no scored token")
        scored = (mask != 0) & ~delta.isnan()
        gap = delta.detach()[scored].double().abs().sort().values.cpu()
        exceeding = 1 - torch.arange(1, gap.numel() + 1, dtype=torch.float64) / gap.numel()
        tokens.plot(gap, exceeding, label=f"{label}: mean {report.mean:.3g}, max {report.max:.3g}")
        statistics = sequence_statistics(delta, mask, tail_nats=tail_nats)
        tail = statistics.tail_tokens[statistics.length > 0].sort(descending=True).values.cpu()
        shares = torch.arange(tail.numel() + 1) / tail.numel()
        held = torch.cat([tail.new_zeros(1), tail.cumsum(0)]) / tail.sum().clamp(min=1)
        concentration.plot(shares, held, label=f"{label}: half in {report.tail_half_in:.1%}")
    tokens.set(xscale="log", yscale="log", xlabel="|logp_train - logp_rollout|, nats")
    tokens.set(ylabel="share of tokens above")
    concentration.set(xlabel="share of sequences, worst first")
    concentration.set(ylabel=f"share of tokens with a gap above {tail_nats:g}")
    for axes in (tokens, concentration):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path)
