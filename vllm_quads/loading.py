"""How vLLM hands checkpoint tensors to the units, and how its layerwise reload is kept out.

A quantized layer registers its packed tensors as parameters under the names that models load
(``weight``, ``w13_weight``, ``w2_weight``), each with a loader that takes the full BF16 tensor. The
same loader serves the first load and every later sync, whatever path it takes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO
from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

from quads_common.layer_weights import drop_open
from quads_common.weight_units import WeightUnits

__all__ = ["LOAD_FORMATS", "finish_loading", "load_themselves", "report_and_drop"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own

# Loaders that hand out checkpoint tensors; the others copy into parameters behind our back.
LOAD_FORMATS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "hf",
    "instanttensor",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)


class SelfLoadingInfo(LayerReloadingInfo):
    """Makes vLLM's layerwise reload leave a layer alone, except for calling it back at the end.

    That machinery turns parameters into BF16 on the meta device, buffers whatever arrives until a
    count of elements is reached, and only then lets the method quantize: it holds whole layers in
    BF16, and a shard sent twice completes the count while another is still missing. A layer whose
    info always reports "already set up, nothing loaded" is passed over by
    ``initialize_layerwise_reload``, keeps its own loaders, and gets
    ``process_weights_after_loading`` from ``finalize_layerwise_reload``.
    """

    def __init__(self, on_boundary: Callable[[], object]) -> None:
        super().__init__(restore_metadata=({}, {}), restore_device=torch.device("cpu"))
        self._on_boundary = on_boundary

    def can_load(self) -> bool:
        """Asked at the start and at the end of a reload: both end what was going on before."""
        self._on_boundary()
        return True

    def reset(self) -> None:
        """Nothing to forget but the meta copies that vLLM recorded; they refer to the layer."""
        self.restore_metadata = ({}, {})


def load_themselves(
    layer: nn.Module,
    all_units: Sequence[WeightUnits],
    on_boundary: Callable[[], object] | None = None,
) -> None:
    """Keep vLLM's layerwise reload away from ``layer``; its boundaries drop incomplete units.

    all_units: empty for a layer that stays BF16. on_boundary: called after that.
    """
    if all_units:
        layer.quads_units = tuple(all_units)

    def boundary() -> None:
        try:
            report_and_drop(all_units)
        finally:
            if on_boundary is not None:
                on_boundary()

    LAYERWISE_INFO[layer] = SelfLoadingInfo(boundary)


def report_and_drop(all_units: Sequence[WeightUnits]) -> list[str]:
    """End of whatever sync was going on: what is incomplete is logged, freed and returned.

    Raises:
        ValueError: weights with NaN or Inf, by name; after all units were dealt with.
    """
    return drop_open(all_units, logger.warning)


def finish_loading(
    layer: nn.Module, load_format: str, on_boundary: Callable[[], object] | None = None
) -> None:
    """``process_weights_after_loading``: idempotent, every unit must hold weights by now.

    on_boundary: called in any case: what came whole counts.

    Raises:
        ValueError: units that never got weights, by name.
    """
    try:
        report_and_drop(layer.quads_units)
        LAYERWISE_INFO[layer].reset()
        for units in layer.quads_units:
            if load_format == "dummy" and not units.loaded:
                units.fill_dummy()
            missing = units.missing()
            if missing:
                raise ValueError(
                    f"{units.name}: no weights for units {missing} of {units.count}; the "
                    "checkpoint is incomplete"
                )
    finally:
        if on_boundary is not None:
            on_boundary()
