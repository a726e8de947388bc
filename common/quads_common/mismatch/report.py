"""The log-prob gap of a batch: how far trainer and rollout are apart, and where the tail sits.

FourSight's observation, that severe tokens sit in a few sequences, is ``tail_half_in``: the
smallest share of sequences that holds half of all tail tokens.
"""

import math
from dataclasses import asdict, dataclass

import torch

from quads_common.mismatch.calibration import quantile
from quads_common.mismatch.statistics import (
    TAIL_NATS,
    check_scored,
    k3,
    sequence_statistics,
)

__all__ = ["GapReport", "gap_report"]

DEEP_TAIL_NATS = 6.0


@dataclass(frozen=True)
class GapReport:
    """All gaps are |logp_train - logp_rollout| in nats, over scored response tokens.

    mean, p99, p999, max: of the gap. k1: mean of logp_rollout - logp_train. k3: mean of
    exp(d) - 1 - d. ess_token, ess_sequence: effective sample size over n, from the ratios
    exp(d) and, per sequence, exp(sum d); 1 is no mismatch. Of infinite ratios only they count, and
    if all ratios are 0 it is 0. tail_share, deep_tail_share: of tokens
    with a gap above 2 and 6. tail_half_in: share of sequences that holds half of the tail tokens
    (0 without any). tail_in_worst_1pct: share of the tail tokens in the worst 1 % of sequences.
    """

    sequences: int
    tokens: int
    unscored: int
    mean: float = 0.0
    p99: float = 0.0
    p999: float = 0.0
    max: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    ess_token: float = 1.0
    ess_sequence: float = 1.0
    tail_share: float = 0.0
    deep_tail_share: float = 0.0
    tail_half_in: float = 0.0
    tail_in_worst_1pct: float = 0.0

    def to_metrics(self, prefix: str = "logprob_gap/") -> dict[str, float]:
        """Flat form for a logger."""
        return {f"{prefix}{name}": float(value) for name, value in asdict(self).items()}

    def to_text(self) -> str:
        """One aligned line per figure."""
        return "\n".join(f"{name:20s} {value:.6g}" for name, value in asdict(self).items())


def gap_report(
    delta: torch.Tensor, mask: torch.Tensor, *, tail_nats: float = TAIL_NATS
) -> GapReport:
    """Report on ``delta``, logp_train - logp_rollout, [B, T], where ``mask`` is not 0.

    Without a response token the figures are 0 and the effective sample sizes 1.

    Raises:
        ValueError: as ``sequence_statistics``; no response token is scored.
    """
    statistics = sequence_statistics(delta, mask, tail_nats=tail_nats)
    present = statistics.length > 0
    scored = (mask != 0) & ~delta.isnan()
    d = delta.detach()[scored].double()
    sequences, tokens = int(present.sum()), d.numel()
    unscored = int(statistics.unscored.sum())
    check_scored(tokens, unscored)
    if not tokens:
        return GapReport(sequences, 0, unscored)
    gap = d.abs()
    total = delta.detach().double().masked_fill(~scored, 0.0).sum(-1)[present]
    half, worst = _concentration(statistics.tail_tokens[present])
    return GapReport(
        sequences=sequences,
        tokens=tokens,
        unscored=unscored,
        mean=float(gap.mean()),
        p99=quantile(gap, 0.99),
        p999=quantile(gap, 0.999),
        max=float(gap.max()),
        k1=float(-d.mean()),
        k3=float(k3(d).mean()),
        ess_token=_effective_share(d),
        ess_sequence=_effective_share(total),
        tail_share=float((gap > tail_nats).double().mean()),
        deep_tail_share=float((gap > DEEP_TAIL_NATS).double().mean()),
        tail_half_in=half,
        tail_in_worst_1pct=worst,
    )


def _effective_share(log_weights: torch.Tensor) -> float:
    """(sum w)^2 / (n sum w^2), computed relative to the largest weight."""
    # Inf and -Inf in one sequence: a ratio of 0 times one of Inf, taken as 0.
    log_weights = log_weights.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    largest = log_weights.max()
    if largest == math.inf:
        return float((log_weights == math.inf).double().mean())
    if largest == -math.inf:
        return 0.0
    weights = torch.exp(log_weights - largest)
    return float(weights.sum() ** 2 / (weights.numel() * weights.square().sum()))


def _concentration(tail_tokens: torch.Tensor) -> tuple[float, float]:
    """Share of sequences that holds half of the tail; share of the tail in the worst 1 %."""
    ordered = tail_tokens.sort(descending=True).values.double()
    running, total = ordered.cumsum(0), float(ordered.sum())
    if not total:
        return 0.0, 0.0
    count = ordered.numel()
    half = int((running < total / 2).sum()) + 1
    return half / count, float(running[math.ceil(count / 100) - 1]) / total
