"""What was quantized: a report, and what the log says after loading."""

import logging
from typing import Any

from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from torch import nn

from quads_common.compensation.serving import loaded
from quads_common.layer_weights import all_units, weight_counts
from sglang_quads.config import QuadsNvfp4Config
from sglang_quads.loading import fill_dummies

__all__ = ["after_loading", "config_of", "model_report"]

logger = logging.getLogger(__name__)


def config_of(model: nn.Module) -> QuadsNvfp4Config | None:
    """The configuration that the model was built with; None if it is not ours."""
    return getattr(model, "quads_config", None)


def model_report(model: nn.Module) -> dict[str, Any]:
    """Counts of layers (linear layers and MoE blocks) and weight bytes of this rank.

    Raises:
        ValueError: the method is not in use.
    """
    config = config_of(model)
    if config is None:
        raise ValueError("this engine does not use --quantization quads_nvfp4")
    counts = weight_counts(model, lambda module: isinstance(module, LinearBase | FusedMoE))
    return {
        "method": config.options.preset,
        "act": config.options.act,
        "backend": config.backend,
        **counts,
    }


def after_loading(model: nn.Module) -> None:
    """What the log says; an engine that quantized other layers than was asked does not start.

    Raises:
        ValueError: no layer was quantized, nothing compensated that should be, or a pattern in
            ``targets`` matches none.
    """
    config = config_of(model)
    assert config is not None, f"{type(model)=}"
    report = model_report(model)
    placement = config.options.placement
    for pattern in placement.unmatched("targets", config.seen):
        raise ValueError(f"targets: {pattern!r} matches no layer of this model")
    for pattern in placement.unmatched("ignore", config.seen):
        logger.warning("quads_nvfp4: ignore: %r matches no layer of this model", pattern)
    if report["layers_quantized"] == 0:
        raise ValueError(
            f"targets {list(placement.targets)} with ignore {list(placement.ignore)} choose no "
            "layer of this model, so nothing would be quantized"
        )
    if config.load_format == "dummy":
        fill_dummies(all_units(model))
    for module in model.modules():
        if hasattr(module, "quads_units"):
            module.quads_serving = True
    if config.runtime is not None:
        loaded(config.runtime, config.options)
    logger.info(
        "quads_nvfp4: method %s, act %s, targets %s, backend %s",
        config.options.preset,
        config.options.act,
        ",".join(placement.targets),
        config.backend,
    )
    before, after = (report[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
    logger.info(
        "quads_nvfp4: %d layers quantized, %d kept, weights %.1f -> %.1f MiB on this rank",
        report["layers_quantized"],
        report["layers_kept"],
        before,
        after,
    )
