"""What was quantized: a worker method for ``collective_rpc`` and one log line after loading."""

from typing import Any

from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase

from quads_common.compensation.serving import loaded
from quads_common.layer_weights import weight_counts
from vllm_quads.config import QuadsNvfp4Config

__all__ = ["after_loading", "model_report", "quads_report"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own


def quads_report(worker: Any) -> dict[str, Any]:
    """Worker method: the report of this worker's model. Raises if the method is not in use."""
    runner = worker.model_runner
    config = runner.vllm_config.quant_config
    if not isinstance(config, QuadsNvfp4Config):
        raise ValueError("this engine does not use --quantization quads_nvfp4")
    return model_report(runner.get_model(), config)


def model_report(model: nn.Module, config: QuadsNvfp4Config) -> dict[str, Any]:
    """Counts of layers (linear layers and MoE blocks) and weight bytes of this rank."""
    counts = weight_counts(model, lambda module: isinstance(module, LinearBase | RoutedExperts))
    return {
        "method": config.options.preset,
        "act": config.options.act,
        "backend": config.backend,
        **counts,
    }


def after_loading(worker: Any) -> None:
    """One INFO line; an engine that quantized other layers than was asked does not start.

    Raises:
        ValueError: no layer was quantized, or a pattern in ``targets`` matches none.
    """
    report = quads_report(worker)
    config = worker.model_runner.vllm_config.quant_config
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
    for module in worker.model_runner.get_model().modules():
        if isinstance(module, RoutedExperts):
            module._quads_served = True
    if config.runtime is not None:
        loaded(config.runtime, config.options)
    before, after = (report[f"bytes_{when}"] / 2**20 for when in ("before", "after"))
    logger.info(
        "quads_nvfp4: %d layers quantized, %d kept, weights %.1f -> %.1f MiB on this rank",
        report["layers_quantized"],
        report["layers_kept"],
        before,
        after,
    )
