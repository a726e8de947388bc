"""Statistics of each sequence's log-prob gap that do not grow with its length.

With ``d_t = logp_train - logp_rollout`` on the T response tokens of a sequence: the mean of
``k3_t = exp(d_t) - 1 - d_t`` (an estimator of KL(rollout || train); verl's ``seq_mean_k3``), the
largest ``|d_t|``, and the number of tail tokens, ``|d_t| > tail_nats``.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

__all__ = [
    "LOG_RATIO_BOUND",
    "TAIL_NATS",
    "SequenceStatistics",
    "check_scored",
    "k3",
    "sequence_statistics",
]

logger = logging.getLogger(__name__)

LOG_RATIO_BOUND = 20.0  # nats; larger log ratios are clamped before exp, as verl does
TAIL_NATS = 2.0
UNSCORED_SHARE = 0.01  # of a batch's response tokens; above it a WARNING


@dataclass(frozen=True)
class SequenceStatistics:
    """One value per sequence, each tensor [B] on the device of the log-probs.

    length: scored response tokens (int64). mean_k3: nats. max_abs: nats, Inf if a gap is.
    tail_tokens: tokens with a gap above ``tail_nats`` (int64). unscored: response tokens whose gap
    is NaN, left out of everything else (int64).
    """

    length: torch.Tensor
    mean_k3: torch.Tensor
    max_abs: torch.Tensor
    tail_tokens: torch.Tensor
    unscored: torch.Tensor

    @property
    def tail_share(self) -> torch.Tensor:
        """Share of the scored tokens that are tail tokens, float64 [B]; 0 for an empty sequence."""
        return self.tail_tokens.double() / self.length.clamp(min=1)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "SequenceStatistics":
        """Every tensor through ``function``: to gather ranks, or to pick sequences."""
        return SequenceStatistics(*(function(getattr(self, f.name)) for f in fields(self)))


def sequence_statistics(
    delta: torch.Tensor, mask: torch.Tensor, *, tail_nats: float = TAIL_NATS
) -> SequenceStatistics:
    """Statistics of ``delta``, logp_train - logp_rollout in nats, where ``mask`` is not 0.

    delta: [B, T], any floating dtype; computed in float64. mask: [B, T], bool or 0/1. B and T may
    be 0, and a sequence may have no response token: its statistics are 0. A NaN gap (an engine
    that returned no log-prob for a token, or -Inf on both sides) is left out and counted; see
    ``check_scored``.

    Raises:
        ValueError: shapes differ or are not [B, T]; ``delta`` is complex; ``mask`` holds anything
            but 0 and 1 (read on the device); ``tail_nats`` is not positive.
    """
    if delta.ndim != 2 or delta.shape != mask.shape:
        raise ValueError(
            f"delta and mask must be [B, T], got {list(delta.shape)} and {list(mask.shape)}"
        )
    if not tail_nats > 0:
        raise ValueError(f"tail_nats must be positive, got {tail_nats}")
    if delta.is_complex() or mask.is_complex():
        raise ValueError(f"delta and mask must be real, got {delta.dtype} and {mask.dtype}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("mask must hold 0 and 1 only, got other values (a fraction, or NaN)")
    delta = delta.detach().double()
    response = mask != 0
    scored = response & ~delta.isnan()
    d = delta.masked_fill(~scored, 0.0)
    length = scored.sum(-1)
    magnitude = d.abs()
    return SequenceStatistics(
        length=length,
        mean_k3=k3(d).sum(-1) / length.clamp(min=1),
        max_abs=magnitude.amax(-1) if d.shape[1] else magnitude.sum(-1),
        tail_tokens=(magnitude > tail_nats).sum(-1),
        unscored=(response & ~scored).sum(-1),
    )


def check_scored(scored: int, unscored: int) -> None:
    """Look at how many response tokens of a batch have a gap that is a number.

    Batches without any would look perfect. Above ``UNSCORED_SHARE`` unscored a WARNING is logged.

    Raises:
        ValueError: there are response tokens and none is scored.
    """
    if unscored and not scored:
        raise ValueError(
            f"none of {unscored} response tokens has a log-prob gap that is a number: the "
            "trainer's or the rollout's log-probs are NaN (or both are -Inf)"
        )
    if unscored > UNSCORED_SHARE * (scored + unscored):
        logger.warning(
            "%d of %d response tokens have no log-prob gap (NaN); they are left out of all figures "
            "and of the sequence filter",
            unscored,
            scored + unscored,
        )


def k3(delta: torch.Tensor) -> torch.Tensor:
    """``exp(d) - 1 - d`` with d clamped to +-LOG_RATIO_BOUND; never negative."""
    d = delta.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(d) - d).clamp(min=0.0)
