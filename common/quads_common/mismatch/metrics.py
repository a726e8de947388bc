"""What the filter did, as numbers to log: drop rates by the sign of the reward and by length.

A filter that drops mostly failures, or mostly long answers, biases the update; these rates show it.
"""

import torch

from quads_common.mismatch.filter import FilterResult
from quads_common.mismatch.statistics import SequenceStatistics

__all__ = ["filter_metrics"]


def filter_metrics(
    result: FilterResult,
    statistics: SequenceStatistics,
    *,
    signal: torch.Tensor | None = None,
    prefix: str = "tim/",
) -> dict[str, float]:
    """Scalars of one batch. A rate over no sequence is 0. Reads the device once.

    signal: advantages (or rewards), [B]; adds drop rates of positive, negative and zero ones.

    ``drop_rate``, ``qualified_rate``: of sequences with response tokens. ``capped``: 1 if the cap
    held something back. ``tail_removed``: share of all tail tokens that lies in dropped sequences.
    ``drop_rate_long``, ``_short``: of sequences longer than the median, and of the others.
    """
    present = statistics.length > 0
    dropped = ~result.keep & present
    # The lower median, so that with two lengths the longer one is "long".
    lengths = statistics.length[present]
    median = lengths.median() if lengths.numel() else statistics.length.new_zeros(())
    long = statistics.length > median
    selections = {
        "drop_rate": present,
        "drop_rate_long": present & long,
        "drop_rate_short": present & ~long,
    }
    if signal is not None:
        if signal.shape != present.shape:
            raise ValueError(f"signal must be {list(present.shape)}, got {list(signal.shape)}")
        selections["drop_rate_positive"] = present & (signal > 0)
        selections["drop_rate_negative"] = present & (signal < 0)
        selections["drop_rate_zero"] = present & (signal == 0)
    values = {name: _share(dropped, chosen) for name, chosen in selections.items()}
    values["qualified_rate"] = _share(result.qualified, present)
    tail = statistics.tail_tokens
    values["tail_removed"] = (tail * dropped).sum().double() / tail.sum().clamp(min=1)
    values["mean_k3"] = (statistics.mean_k3 * present).sum() / present.sum().clamp(min=1)
    values["max_abs"] = statistics.max_abs.max() if present.numel() else tail.new_zeros(())
    values["unscored_tokens"] = statistics.unscored.sum()
    numbers = torch.stack([value.double() for value in values.values()]).tolist()
    metrics = {f"{prefix}{name}": number for name, number in zip(values, numbers, strict=True)}
    metrics[f"{prefix}capped"] = float(result.capped)
    return metrics


def _share(chosen: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    return (chosen & among).sum().double() / among.sum().clamp(min=1)
