"""Limits of the filter from a reference run: the same model and prompts with a BF16 rollout.

The k3 limit becomes the reference's 99.5 % quantile, but not less than K3_FLOOR; the other two rise
to it where the reference passes the default. Mismatch of a MoE model grows during training even in
BF16, so a limit that is never renewed tightens by itself: watch ``tim/drop_rate``.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch

from quads_common.format import CONTRACT_VERSION
from quads_common.mismatch.filter import FilterOptions
from quads_common.mismatch.statistics import SequenceStatistics

__all__ = ["calibrate", "load_options", "quantile", "save_options"]

# The lower end of the range that verl's documentation recommends for seq_mean_k3. A confident model
# in BF16 has quantiles far below what any quantization does; such a limit would qualify everything.
K3_FLOOR = 0.001
_VERSION_KEY = "contract_version"


def calibrate(
    reference: SequenceStatistics,
    base: FilterOptions | None = None,
    *,
    share: float = 0.995,
    k3_floor: float = K3_FLOOR,
) -> FilterOptions:
    """Limits that let ``share`` of the reference's sequences pass, each taken alone.

    reference: made with ``base.tail_nats``. base: everything that is not calibrated. k3_floor: the
    k3 limit is not set below it.

    Raises:
        ValueError: fewer than ``1 / (1 - share)`` sequences, too few to know that quantile; a
            reference without any gap, or with more than 1 - ``share`` of infinite ones; ``share``
            outside (0, 1); ``k3_floor`` negative or not a number.
    """
    base = base or FilterOptions()
    if not (math.isfinite(k3_floor) and k3_floor >= 0):
        raise ValueError(f"k3_floor must be a number of at least 0, got {k3_floor!r}")
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}")
    present = reference.length > 0
    found, needed = int(present.sum()), math.ceil(1 / (1 - share) - 1e-9)
    if found < needed:
        raise ValueError(
            f"the reference has {found} sequences; the {share} quantile needs at least {needed}"
        )
    limit = quantile(reference.mean_k3[present], share)
    if limit <= 0:
        raise ValueError(
            "the reference has no log-prob gap at all: were both sides' log-probs the same tensor?"
        )
    largest = quantile(reference.max_abs[present], share)
    if not math.isfinite(largest):
        raise ValueError(
            f"more than {1 - share:.2%} of the reference's sequences have an infinite log-prob gap "
            "(a log-prob of -Inf on one side): that is no reference for a limit"
        )
    return dataclasses.replace(
        base,
        k3=max(limit, k3_floor),
        tail_share=max(base.tail_share, quantile(reference.tail_share[present], share)),
        max_abs=max(base.max_abs, largest),
    )


def quantile(values: torch.Tensor, share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed; no limit on size."""
    position = max(0, math.ceil(share * values.numel() - 1e-9) - 1)
    return float(values.flatten().sort().values[position])


def save_options(options: FilterOptions, path: Path | str) -> None:
    """Write a JSON file that ``load_options`` and the trainers' plug-ins read."""
    content = {_VERSION_KEY: CONTRACT_VERSION, **options.to_dict()}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_options(path: Path | str) -> FilterOptions:
    """Read what ``save_options`` wrote, or a hand-written JSON object of options.

    Raises:
        ValueError: unreadable, not a JSON object, another contract version, an unknown key or a
            bad value; the message names the file.
    """
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(raw).__name__}")
    version = raw.pop(_VERSION_KEY, CONTRACT_VERSION)
    if version != CONTRACT_VERSION:
        raise ValueError(f"{path}: contract version {version!r}, this is {CONTRACT_VERSION}")
    return FilterOptions.from_dict(raw, str(path))
