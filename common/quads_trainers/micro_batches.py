"""The sequence filter where a trainer shows one micro-batch at a time: OpenRLHF and slime."""

import logging

import torch

from quads_common.mismatch import (
    FilterOptions,
    FilterResult,
    RunningCap,
    SequenceStatistics,
    select_sequences,
    sequence_statistics,
)

__all__ = ["MicroBatchFilter"]


class MicroBatchFilter:
    """Decides on micro-batches of one process, with one cap over many of them.

    If more drifted than the cap let go, a WARNING says so: at most once in ``cap.window``
    sequences, so once in about a rollout batch.
    """

    def __init__(self, options: FilterOptions, logger: logging.Logger) -> None:
        self.options = options
        self.logger = logger
        self.cap = RunningCap(options.max_drop_share)
        self._warned_at: int | None = None

    def select(
        self, delta: torch.Tensor, mask: torch.Tensor
    ) -> tuple[SequenceStatistics, FilterResult]:
        """delta: logp_train - logp_rollout, mask: of response tokens; both [B, T]."""
        statistics = sequence_statistics(delta, mask, tail_nats=self.options.tail_nats)
        result = select_sequences(statistics, self.options, cap=self.cap)
        if result.capped and self._due():
            self._warned_at = self.cap.seen
            self.logger.warning(
                "sequence filter: %d of a micro-batch of %d sequences drifted beyond the limits, "
                "the cap let %d be dropped: the rollout as a whole has drifted",
                int(result.qualified.sum()),
                len(result.keep),
                int((~result.keep).sum()),
            )
        return statistics, result

    def _due(self) -> bool:
        return self._warned_at is None or self.cap.seen - self._warned_at >= self.cap.window
