"""slime: the sequence filter as its custom importance-sampling function.

    --use-tis --tis-clip 2.0 --custom-tis-function-path quads_trainers.slime.tis_with_filter
    export VLLM_QUADS_TIM='{"k3": 0.01}'      # limits; a JSON object or a file

Truncated importance sampling as slime's own function does it, then the filter through the masks
that the function returns. slime calls it for one micro-batch of one data-parallel rank, so the cap
counts over many of them (``MicroBatchFilter``). slime trains in Megatron, for which there is no QAT
here: a W4A4 rollout then meets a BF16 trainer (see docs/trainers.md).
"""

import logging
from typing import Any

import torch

from quads_common.mismatch import FilterOptions, filter_metrics
from quads_trainers.filter_environment import filter_options
from quads_trainers.micro_batches import MicroBatchFilter

__all__ = ["tis_with_filter"]

logger = logging.getLogger(__name__)

_filters: dict[FilterOptions, MicroBatchFilter] = {}  # of this process


def tis_with_filter(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weighted loss, masks with dropped sequences zeroed, and metrics per token.

    pg_loss: [sum of T]. The lists hold one [T] for each sequence.

    Raises:
        ValueError: no sequences; a rollout's log-probs of another length than the trainer's.
        NotImplementedError: context parallelism, which shows a rank parts of sequences;
            ``recompute_loss_function``, which would count every sequence twice.
    """
    shapes = [(len(t), len(m)) for t, m in zip(train_log_probs, loss_masks, strict=True)]
    if any(tokens != masked for tokens, masked in shapes):
        raise NotImplementedError(
            "the sequence filter needs whole sequences: it does not work with context parallelism"
        )
    if not shapes:
        raise ValueError("the sequence filter got a micro-batch without sequences")
    for i, (t, r) in enumerate(zip(train_log_probs, rollout_log_probs, strict=True)):
        if len(t) != len(r):
            raise ValueError(
                f"sequence {i} has {len(t)} log-probs of the trainer and {len(r)} of the rollout"
            )
    if getattr(args, "recompute_loss_function", False):
        raise NotImplementedError("the sequence filter does not work with recompute_loss_function")
    options = filter_options() or FilterOptions()
    delta = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    ratio = delta.exp()
    weights = ratio.clamp(min=getattr(args, "tis_clip_low", 0.0), max=args.tis_clip)
    metrics = {
        "tis": ratio.detach().clone(),
        "tis_clipfrac": (weights != ratio).float(),
        "tis_abs": (ratio - 1).abs().detach(),
    }
    lengths = [len(t) for t in train_log_probs]
    micro_batches = _filters.setdefault(options, MicroBatchFilter(options, logger))
    statistics, result = micro_batches.select(
        _rows(delta.detach(), lengths), _rows(torch.cat(loss_masks).to(delta.dtype), lengths)
    )
    masks = [m * k.to(m.dtype) for m, k in zip(loss_masks, result.keep, strict=True)]
    # slime averages metrics over tokens, so a figure of the micro-batch is repeated for each.
    for name, value in filter_metrics(result, statistics, prefix="tim_").items():
        metrics[name] = torch.full_like(delta, value)
    return pg_loss * weights.detach(), masks, metrics


def _rows(flat: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Concatenated sequences as [B, T] with zeros behind each."""
    return torch.nn.utils.rnn.pad_sequence(list(flat.split(lengths)), batch_first=True)
