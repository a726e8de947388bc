"""Quantized weights as an engine's modules hold them: parameters, units, and whole-model questions.

Nothing here knows an engine. A quantized layer keeps its units in the attribute ``quads_units``.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quads_common.format import BLOCK_SIZE, GlobalScaleRule, check_block_aligned
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import Region, WeightUnits

__all__ = [
    "WeightsLostError",
    "add_quantized_weight",
    "all_units",
    "drop_open",
    "mark_lost",
    "partial_fingerprints",
    "raise_if_lost",
    "refuse_scale",
    "weight_counts",
    "whole_update",
]


class WeightsLostError(RuntimeError):
    """The model was asked to run while quantized layers hold no weights."""


def add_quantized_weight(
    layer: nn.Module,
    name: str,
    shape: tuple[int, ...],
    units: str,
    parts: Sequence[str],
    regions: Callable[[int], list[Region]],
    rule: GlobalScaleRule,
    layout: TileLayout | None = None,
) -> WeightUnits:
    """Register the packed tensors of a [U, N, K] (or [N, K]) weight and return their units.

    Parameters: ``name`` uint8 [..., K/2], ``name_scale`` float8_e4m3fn [..., K/16] and
    ``name_global_scale`` float32 [U]. units: name for messages. layout: their memory
    order; None: canonical.
    """
    *lead, k = shape
    check_block_aligned(k, units)
    packed = nn.Parameter(torch.zeros((*lead, k // 2), dtype=torch.uint8), requires_grad=False)
    scale_bytes = torch.zeros((*lead, k // BLOCK_SIZE), dtype=torch.uint8)
    scale = nn.Parameter(scale_bytes.view(torch.float8_e4m3fn), requires_grad=False)
    count = shape[0] if len(shape) == 3 else 1
    global_scale = nn.Parameter(torch.ones(count, dtype=torch.float32), requires_grad=False)
    layer.register_parameter(name, packed)
    layer.register_parameter(f"{name}_scale", scale)
    layer.register_parameter(f"{name}_global_scale", global_scale)
    for parameter in (scale, global_scale):
        parameter.weight_loader = refuse_scale  # type: ignore[attr-defined]
    stacked = (count, *shape[-2:-1], -1)
    return WeightUnits(
        units,
        parts,
        packed.data.view(stacked),
        scale.data.view(stacked),
        global_scale.data,
        regions,
        rule,
        layout,
    )


def refuse_scale(
    param: nn.Parameter, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Loader of the scale parameters: no BF16 checkpoint holds them."""
    raise ValueError(
        "the checkpoint holds quantization scales: quads_nvfp4 quantizes BF16 checkpoints; serve a "
        "quantized one without --quantization quads_nvfp4"
    )


def all_units(model: nn.Module) -> list[WeightUnits]:
    """Every unit group of a model, in module order."""
    return [u for module in model.modules() for u in getattr(module, "quads_units", ())]


def drop_open(units: Iterable[WeightUnits], warn: Callable[[str], None]) -> list[str]:
    """End of whatever sync was going on: what is incomplete goes to ``warn``, is freed, returned.

    Raises:
        ValueError: weights with NaN or Inf, by name; after all units were dealt with.
    """
    dropped, errors = [], []
    for group in units:
        try:
            dropped += group.drop_open()
        except ValueError as error:
            errors.append(str(error))
    for sentence in dropped:
        warn(f"Incomplete weight update: {sentence}")
    if errors:
        raise ValueError("; ".join(errors))
    return dropped


@contextlib.contextmanager
def whole_update(units: Sequence[WeightUnits]) -> Iterator[Callable[[], str]]:
    """Around an update that must bring everything; yields what tells of that, once it is over.

    That is a sentence naming the units that did not come whole, or "".
    """
    before = [set(group.loaded) for group in units]
    for group in units:
        group.loaded.clear()

    def incomplete() -> str:
        left = {u.name: [i for i in range(u.count) if i not in u.loaded] for u in units}
        named = [f"{name}{ids}" for name, ids in left.items() if ids]
        if not named:
            return ""
        shown = ", ".join(named[:4]) + (f" and {len(named) - 4} more" if len(named) > 4 else "")
        return (
            f"the checkpoint is incomplete: no complete weights for {shown}; they keep their "
            "previous ones, all others are new"
        )

    try:
        yield incomplete
    finally:
        for group, held in zip(units, before, strict=True):
            group.loaded |= held


def mark_lost(model: nn.Module) -> None:
    """The memory of the weights was discarded (sleep, release): all must come again."""
    for units in all_units(model):
        units.forget()


def raise_if_lost(model: nn.Module, since: str) -> None:
    """Raise ``WeightsLostError`` naming the units that hold no weights; ``since`` what event."""
    lost = [f"{u.name}{u.missing()}" for u in all_units(model) if u.missing()]
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise WeightsLostError(
            f"no weights since {since} discarded them: {shown}; sync all weights first"
        )


def partial_fingerprints(model: nn.Module) -> dict[str, list[dict[str, Any]]]:
    """This rank's partial fingerprints by checkpoint tensor name, for ``combine_ranks``."""
    found: dict[str, list[dict[str, Any]]] = {}
    for units in all_units(model):
        for unit in range(units.count):
            for name, parts in units.fingerprints(unit).items():
                found.setdefault(name, []).extend(part.to_json() for part in parts)
    return found


def weight_counts(model: nn.Module, kept: Callable[[nn.Module], bool]) -> dict[str, int]:
    """Layers quantized and kept, and bytes of all weights before and after, of this rank.

    BF16 columns of compensated inputs are weights too. kept: says whether an unquantized module
    counts as a layer (linear or experts).
    """
    quantized = kept_layers = before = after = 0
    packed: set[int] = set()
    for module in model.modules():
        group = getattr(module, "quads_units", None)
        if group is None:
            kept_layers += kept(module)
            continue
        quantized += 1
        for units in group:
            before += units.packed.numel() * 2 * torch.bfloat16.itemsize
            after += sum(t.nbytes for t in (units.packed, units.block_scale, units.global_scale))
        buffers = module.named_buffers(recurse=False)  # columns: see ``compensation.LayerInput``
        after += sum(b.nbytes for name, b in buffers if re.fullmatch(r"quads_\w+_columns", name))
        named = module.named_parameters(recurse=False)
        packed |= {id(p) for name, p in named if not name.endswith("bias")}
    other = sum(p.nbytes for p in model.parameters() if id(p) not in packed)
    return {
        "layers_quantized": quantized,
        "layers_kept": kept_layers,
        "bytes_before": before + other,
        "bytes_after": after + other,
    }
