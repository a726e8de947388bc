"""The TIM-aware sequence filter: which sequences of a batch drifted too far to learn from.

A sequence qualifies if any of these holds (``FilterOptions`` has the limits)::

    mean k3 > k3
    tail tokens > tail_share of its tokens, and at least tail_tokens of them
    max |d| > max_abs

Of those that qualify at most ``floor(max_drop_share * B)`` are dropped (in a batch too small for
that, one of several), the worst first: by the largest ratio of a statistic to its limit. Sums over
a sequence are not used: they would reject long answers for their length. Compute advantages over
ALL samples first, then drop, then let the loss average over the tokens that remain.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quads_common.mismatch.statistics import TAIL_NATS, SequenceStatistics, check_scored

__all__ = ["FilterOptions", "FilterResult", "RunningCap", "select_sequences"]

CAP_WINDOW = 128  # sequences, about the rollout batch of one data-parallel rank


@dataclass(frozen=True)
class FilterOptions:
    """Limits of the filter. ``calibrate`` sets the first three from a reference run.

    k3: largest mean k3, in nats. tail_share: largest share of tail tokens. max_abs: largest
    single gap in nats (well above 1: engines differ by 0.7 without any quantization).
    tail_tokens: fewer tail tokens than this never count. tail_nats: what a tail token is.
    max_drop_share: cap on the share of sequences that are dropped; 0 drops none and only measures.
    min_group_kept: where ``groups`` are given, the rest of a group that keeps fewer than this is
    dropped too, if the cap allows; 0 switches it off.

    Raises:
        ValueError: names the key and what is allowed.
    """

    k3: float = 0.01
    tail_share: float = 0.005
    max_abs: float = 12.0
    tail_tokens: int = 2
    tail_nats: float = TAIL_NATS
    max_drop_share: float = 0.1
    min_group_kept: int = 2

    def __post_init__(self) -> None:
        for key in ("k3", "tail_share", "max_abs", "tail_nats"):
            value = getattr(self, key)
            if not _is_number(value) or not value > 0:
                raise ValueError(f"{key} must be a positive number, got {value!r}")
        for key in ("tail_tokens", "min_group_kept"):
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{key} must be an integer of at least 0, got {value!r}")
        _check_share(self.max_drop_share)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str) -> "FilterOptions":
        """Check and build; ``source`` says in messages where the options came from.

        Raises:
            ValueError: not a mapping, an unknown key or a bad value.
        """
        if not isinstance(raw, Mapping):
            raise ValueError(f"{source}: must be a mapping of options, got {type(raw).__name__}")
        unknown = sorted(set(raw) - set(cls.__dataclass_fields__), key=str)
        if unknown:
            allowed = list(cls.__dataclass_fields__)
            raise ValueError(f"{source}: unknown option {unknown[0]!r}; allowed are {allowed}")
        try:
            return cls(**raw)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form; ``from_dict`` takes it back."""
        return asdict(self)


@dataclass(frozen=True)
class FilterResult:
    """What the filter decided; tensors are [B].

    keep: bool; a sequence without response tokens is kept. qualified: bool, drifted beyond a
    limit. severity: float64, the largest ratio of a statistic to its limit (above 1: qualified).
    capped: more qualified than the cap let go. This is the alarm: the rollout as a whole drifted.
    With a cap of 0 it is never set: see ``qualified``.
    """

    keep: torch.Tensor
    qualified: torch.Tensor
    severity: torch.Tensor
    capped: bool


class RunningCap:
    """A cap over many small batches, for trainers that show one micro-batch at a time.

    Every sequence adds ``max_drop_share`` to a credit and every dropped one takes 1. What one batch
    does not use a later one may, but what is carried over is at most the share of ``window``
    sequences (and at least 1, so that a micro-batch can drop anything): else a long healthy run
    would let a wholly drifted rollout be dropped without an alarm. Of n sequences in a row at most
    ``max_drop_share * (n + window)``, or one more than the share of n, are dropped.

    Raises:
        ValueError: ``max_drop_share`` outside [0, 1], ``window`` below 1.
    """

    def __init__(self, max_drop_share: float, window: int = CAP_WINDOW) -> None:
        _check_share(max_drop_share)
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise ValueError(f"window must be an integer of at least 1, got {window!r}")
        self.max_drop_share = max_drop_share
        self.window = window
        self.seen = 0
        self.dropped = 0
        self.credit = 1.0 if max_drop_share else 0.0

    def allowance(self, sequences: int) -> int:
        """How many of the next ``sequences`` may be dropped."""
        total = math.floor(self.credit + self.max_drop_share * sequences + 1e-9)
        return max(0, min(sequences, total))

    def record(self, sequences: int, dropped: int) -> None:
        """Note what became of a batch."""
        self.seen += sequences
        self.dropped += dropped
        most = max(1.0, self.max_drop_share * self.window) if self.max_drop_share else 0.0
        self.credit = min(most, self.credit + self.max_drop_share * sequences - dropped)


def select_sequences(
    statistics: SequenceStatistics,
    options: FilterOptions,
    *,
    groups: torch.Tensor | None = None,
    cap: RunningCap | None = None,
) -> FilterResult:
    """Decide which sequences to keep.

    statistics: made with ``options.tail_nats``; of the WHOLE batch (gather ranks first), since the
        cap counts all of it. groups: int [B], the prompt of each sequence. cap: overrides
        ``options.max_drop_share`` by one that counts over batches; updated.

    Deterministic: among equals the earlier sequence is dropped first. Reads the device once or
    twice.

    Raises:
        ValueError: ``groups`` has another shape; no response token is scored (``check_scored``).
    """
    if groups is not None and groups.shape != statistics.length.shape:
        raise ValueError(
            f"groups must be {list(statistics.length.shape)}, got {list(groups.shape)}"
        )
    present = statistics.length > 0
    severity = _severity(statistics, options)
    qualified = present & (severity > 1)
    counts = [present.sum(), qualified.sum(), statistics.length.sum(), statistics.unscored.sum()]
    sequences, wanted, scored, unscored = map(int, torch.stack(counts).tolist())
    check_scored(scored, unscored)
    if cap is None:
        share, allowed = options.max_drop_share, _allowance(options.max_drop_share, sequences)
    else:
        share, allowed = cap.max_drop_share, cap.allowance(sequences)
    # Those that do not qualify sort behind all that do.
    order = torch.where(qualified, severity, -1.0).argsort(descending=True, stable=True)
    drop = torch.zeros_like(qualified)
    drop[order[: min(wanted, allowed)]] = True
    if groups is not None and options.min_group_kept:
        drop = _drop_rests(drop, present, groups, options.min_group_kept, allowed)
    if cap is not None:
        cap.record(sequences, int(drop.sum()))
    return FilterResult(~drop, qualified, severity, capped=share > 0 and wanted > allowed)


def _allowance(share: float, sequences: int) -> int:
    """How many of a whole batch may go: at least one of several, unless the cap is 0."""
    least = 1 if share and sequences > 1 else 0
    return max(least, math.floor(share * sequences + 1e-9))


def _severity(statistics: SequenceStatistics, options: FilterOptions) -> torch.Tensor:
    enough = statistics.tail_tokens >= options.tail_tokens
    return torch.stack(
        [
            statistics.mean_k3 / options.k3,
            torch.where(enough, statistics.tail_share / options.tail_share, 0.0),
            statistics.max_abs / options.max_abs,
        ]
    ).amax(0)


def _drop_rests(
    drop: torch.Tensor, present: torch.Tensor, groups: torch.Tensor, least: int, allowed: int
) -> torch.Tensor:
    """Drop what is left of groups that lost members and keep fewer than ``least``, within the cap.

    Groups that lost nothing are left alone, however small.
    """
    _, member = torch.unique(groups, return_inverse=True)
    count = int(member.max()) + 1 if member.numel() else 0
    lost = torch.zeros(count, dtype=torch.long, device=drop.device)
    kept = lost.clone()
    lost.index_add_(0, member, drop.long())
    kept.index_add_(0, member, (present & ~drop).long())
    rests = (lost > 0) & (kept > 0) & (kept < least)
    budget = allowed - int(drop.sum())
    result = drop.clone()
    for group in rests.nonzero().flatten().tolist():
        size = int(kept[group])
        if size <= budget:
            result |= (member == group) & present
            budget -= size
    return result


def _check_share(value: object) -> None:
    if not _is_number(value) or not 0 <= value <= 1:  # type: ignore[operator]
        raise ValueError(f"max_drop_share must lie in [0, 1], got {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
