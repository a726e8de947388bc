"""verl: the option ``rollout_rs=seq_tim`` of its rollout correction.

    algorithm.rollout_correction.rollout_rs=seq_tim
    algorithm.rollout_correction.rollout_rs_threshold=0.01        # the k3 limit, or a JSON file

verl calls one function for its rejection masks and has no registry for more, so that function is
replaced by one that handles ``seq_tim`` and hands every other option on. It may stand beside
others (``seq_tim,token_k1`` with thresholds ``tim.json,0.5_2.0``); a token must pass all.

The cap needs the whole batch. In bypass mode verl's actor calls that function once for each
micro-batch instead, where ``seq_tim`` is refused.
"""

import contextvars
import functools
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quads_common.mismatch import (
    FilterOptions,
    filter_metrics,
    gap_report,
    load_options,
    select_sequences,
    sequence_statistics,
)

__all__ = ["OPTION", "patch_rollout_correction", "read_threshold"]

logger = logging.getLogger(__name__)

OPTION = "seq_tim"
# What the caller of the mask function knows of the batch: rewards [B] and groups [B].
_batch: contextvars.ContextVar[dict[str, torch.Tensor] | None] = contextvars.ContextVar("batch")


def patch_rollout_correction(module: ModuleType) -> None:
    """Add the option to ``verl.trainer.ppo.rollout_corr_helper``."""
    if OPTION in module.SUPPORTED_ROLLOUT_RS_OPTIONS:
        return
    others = module.compute_rollout_rejection_mask
    add_to_batch = module.compute_rollout_correction_and_add_to_batch

    @functools.wraps(others)
    def compute_rollout_rejection_mask(
        log_ratio: torch.Tensor,
        response_mask: torch.Tensor,
        rollout_rs: str = "token_k1",
        rollout_rs_threshold: str | float | None = None,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        names = [name.strip() for name in str(rollout_rs).split(",") if name.strip()]
        if OPTION not in names:
            return others(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
        facts = _batch.get(None)
        if facts is None:
            raise ValueError(
                f"rollout_rs={OPTION} needs the whole batch, and bypass mode shows it micro-batch "
                "by micro-batch: set algorithm.rollout_correction.bypass_mode=False, or use "
                "seq_mean_k3"
            )
        if log_ratio.shape[0] == 0:
            return response_mask, {}
        thresholds = _thresholds(names, rollout_rs_threshold)
        options = read_threshold(thresholds.pop(OPTION))
        keep, metrics = _filter(log_ratio, response_mask, options, facts)
        mask = response_mask * keep.unsqueeze(-1).to(response_mask.dtype)
        if thresholds:
            # Judged on all tokens, as verl does with several options.
            other_mask, other_metrics = others(
                log_ratio, response_mask, ",".join(thresholds), ",".join(thresholds.values())
            )
            mask, metrics = mask * other_mask, {**other_metrics, **metrics}
        _overall(metrics, mask, response_mask)
        return mask, metrics

    @functools.wraps(add_to_batch)
    def compute_rollout_correction_and_add_to_batch(batch: Any, config: Any) -> Any:
        token = _batch.set(_facts(batch))
        try:
            return add_to_batch(batch, config)
        finally:
            _batch.reset(token)

    module.SUPPORTED_ROLLOUT_RS_OPTIONS.add(OPTION)
    module.compute_rollout_rejection_mask = compute_rollout_rejection_mask
    module.compute_rollout_correction_and_add_to_batch = compute_rollout_correction_and_add_to_batch


def read_threshold(value: str) -> FilterOptions:
    """Options from verl's threshold: the k3 limit, or the path of a file of ``save_options``.

    Raises:
        ValueError: neither.
    """
    try:
        # Python reads the underscore of "0.5_2", verl's way to write a range, as nothing.
        limit = float(value.replace("_", "to"))
    except ValueError:
        if not Path(value).is_file():
            raise ValueError(
                f"rollout_rs_threshold of {OPTION} must be the k3 limit or a JSON file, "
                f"got {value!r}"
            ) from None
        return load_options(value)
    return FilterOptions(k3=limit)


def _thresholds(names: list[str], threshold: str | float | None) -> dict[str, str]:
    """Option -> threshold, in verl's way of writing several."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"rollout_rs names {twice[0]!r} twice: {','.join(names)!r}")
    if isinstance(threshold, bool) or threshold is None:
        raise ValueError(f"rollout_rs_threshold must be given with {OPTION}, got {threshold!r}")
    values = [value.strip() for value in str(threshold).split(",") if value.strip()]
    if len(values) != len(names):
        raise ValueError(
            f"rollout_rs_threshold needs one entry for each of {names}, got {len(values)}: "
            f"{threshold!r}"
        )
    return dict(zip(names, values, strict=True))


def _filter(
    log_ratio: torch.Tensor,
    response_mask: torch.Tensor,
    options: FilterOptions,
    facts: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, dict[str, float]]:
    """Which sequences stay, [B] bool, and metrics (verl adds its prefix)."""
    statistics = sequence_statistics(log_ratio, response_mask, tail_nats=options.tail_nats)
    result = select_sequences(statistics, options, groups=facts.get("groups"))
    metrics = filter_metrics(result, statistics, signal=facts.get("rewards"), prefix=f"{OPTION}/")
    metrics |= gap_report(log_ratio, response_mask).to_metrics("logprob_gap/")
    if result.capped:
        logger.warning(
            "%s: %d sequences drifted beyond the limits, the cap let %d be dropped: the rollout "
            "as a whole has drifted",
            OPTION,
            int(result.qualified.sum()),
            int((~result.keep).sum()),
        )
    return result.keep, metrics


def _overall(metrics: dict[str, float], mask: torch.Tensor, before: torch.Tensor) -> None:
    """The two figures that verl reports over all options."""
    response = before != 0
    removed = response & (mask == 0)
    tokens = response.sum().clamp(min=1)
    metrics["rollout_rs_masked_fraction"] = float(removed.sum() / tokens)
    metrics["rollout_rs_seq_masked_fraction"] = float(removed.any(-1).double().mean())


def _facts(batch: Any) -> dict[str, torch.Tensor]:
    """Rewards and groups, where verl's batch has them already."""
    facts: dict[str, torch.Tensor] = {}
    device = batch.batch["response_mask"].device
    for key in ("token_level_scores", "rm_scores"):
        if key in batch.batch:
            facts["rewards"] = batch.batch[key].sum(-1)
            break
    uids = batch.non_tensor_batch.get("uid")
    if uids is not None:
        numbers: dict[str, int] = {}
        groups = [numbers.setdefault(str(uid), len(numbers)) for uid in uids]
        facts["groups"] = torch.tensor(groups, device=device)
    return facts
