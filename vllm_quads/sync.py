"""Weight sync seen from outside: fingerprints, boundaries, and layers whose weights are lost."""

from typing import Any

from torch import nn

from quads_common.compensation.layers import Runtime
from quads_common.weight_units import WeightUnits
from vllm_quads.loading import report_and_drop

__all__ = [
    "WeightsLostError",
    "all_units",
    "mark_lost",
    "quads_end_sync",
    "quads_fingerprints",
    "raise_if_lost",
    "runtime_of",
]


class WeightsLostError(RuntimeError):
    """The model was asked to run while quantized layers hold no weights."""


def all_units(model: nn.Module) -> list[WeightUnits]:
    """Every unit group of a model, in module order."""
    return [u for module in model.modules() for u in getattr(module, "quads_units", ())]


def quads_fingerprints(worker: Any) -> dict[str, list[dict[str, Any]]]:
    """Worker method: this rank's partial fingerprints by checkpoint tensor name.

    ``quads_common.fingerprint.combine_ranks`` makes digests of what all workers return; names and
    digests equal those of ``quads_common.qat.fingerprints`` on the trainer's model.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for units in all_units(worker.model_runner.get_model()):
        for unit in range(units.count):
            for name, parts in units.fingerprints(unit).items():
                found.setdefault(name, []).extend(part.to_json() for part in parts)
    return found


def quads_end_sync(worker: Any) -> list[str]:
    """Worker method: end whatever sync is going on; returns what was incomplete and dropped."""
    dropped = report_and_drop(all_units(worker.model_runner.get_model()))
    runtime = runtime_of(worker)
    if runtime is not None:
        runtime.compensator.end_sync()
    return dropped


def runtime_of(worker: Any) -> Runtime | None:
    """What the compensated layers of a worker share; None without any, or another method's."""
    return getattr(worker.vllm_config.quant_config, "runtime", None)


def mark_lost(model: nn.Module) -> None:
    """The memory of the weights was discarded (sleep level 2): all must come again."""
    for units in all_units(model):
        units.forget()


def raise_if_lost(model: nn.Module) -> None:
    """Raise ``WeightsLostError`` naming the units that hold no weights."""
    lost = [f"{u.name}{u.missing()}" for u in all_units(model) if u.missing()]
    if lost:
        shown = ", ".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
        raise WeightsLostError(
            f"no weights since sleep level 2 discarded them: {shown}; sync all weights first"
        )
