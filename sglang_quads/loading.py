"""How checkpoint tensors reach the units, at the first load and in every weight update.

SGLang's models look parameters up by name and call their ``weight_loader``. A quantized layer
registers its packed tensors under the names that models load (``weight``, ``w13_weight``,
``w2_weight``), each with a loader that takes the full BF16 tensor and quantizes a unit as soon as
it is complete. So no update path needs a call after it, on any version.

What models pass over in silence is caught around ``model.load_weights``: stacked experts
(transformers 5) go to the layer's loader, and a tensor of a quantized layer that nothing took is an
error, as is one that is named like such a tensor (see ``names``).
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from torch import nn

from quads_common.layer_weights import drop_open
from quads_common.shards import ExpertLoader, LinearLoader
from quads_common.weight_units import WeightUnits
from sglang_quads.names import ModelNames

__all__ = [
    "LOAD_FORMATS",
    "drain_errors",
    "end_layer",
    "end_sync",
    "fill_dummies",
    "finish_loading",
    "watch_load_weights",
]

logger = logging.getLogger(__name__)

# Loaders that hand out checkpoint tensors; the others copy into parameters behind our back.
LOAD_FORMATS = (
    "auto",
    "dummy",
    "fastsafetensors",
    "mistral",
    "npcache",
    "pt",
    "runai_streamer",
    "safetensors",
)
STACKS = {".gate_up_proj": "w13", ".down_proj": "w2"}  # transformers 5: [E, 2I, H] and [E, H, I]

# Errors of serving layers, found where SGLang would drop an exception or die of it.
_errors: list[str] = []


def end_sync(units: Iterable[WeightUnits]) -> list[str]:
    """End of whatever update was going on: what is incomplete is logged, freed and returned.

    Raises:
        ValueError: weights with NaN or Inf, by name.
    """
    return drop_open(units, logger.warning)


def end_layer(layer: nn.Module) -> None:
    """``end_sync`` of a layer of a serving model; errors wait for ``drain_errors``.

    It is a boundary for the compensated inputs too, of which only the first layer's does anything.
    """
    try:
        end_sync(layer.quads_units)
    except ValueError as error:
        _errors.append(str(error))
    finally:
        end_lists = getattr(layer, "quads_boundary", None)
        if end_lists is not None:
            end_lists()


def drain_errors() -> list[str]:
    """Errors that were kept back since the last call."""
    found = list(_errors)
    _errors.clear()
    return found


def finish_loading(layer: nn.Module, load_format: str) -> None:
    """``process_weights_after_loading``: idempotent; at the first load every unit must be there.

    Raises:
        ValueError: units that never got weights, by name.
    """
    if getattr(layer, "quads_serving", False):
        end_layer(layer)
        return
    end_sync(layer.quads_units)
    if load_format == "dummy":
        return  # fill_dummies follows: SGLang writes random numbers into scales after this
    for units in layer.quads_units:
        missing = units.missing()
        if missing:
            raise ValueError(
                f"{units.name}: no weights for units {missing} of {units.count}; the checkpoint is "
                "incomplete"
            )


def fill_dummies(units: Iterable[WeightUnits]) -> None:
    """Random codes for an engine that starts without a checkpoint (``--load-format dummy``)."""
    for group in units:
        group.fill_dummy()


def watch_load_weights(model: nn.Module) -> None:
    """Put ``Watch`` around ``model.load_weights``, the function that every path calls."""
    load_weights, watch = model.load_weights, Watch(model)

    @functools.wraps(load_weights)
    def watched(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
        return watch.load(functools.partial(load_weights, **kwargs), weights, *args)

    model.load_weights = watched


@dataclass
class Seen:
    """Of one call. expected: calls of loaders that must come. not_taken: names without one.

    known: whether any of the other tensors has a name of the model's. doubtful, unknown: those of
    which that is not certain, and those that have none. last: what the model got last.
    """

    expected: int = 0
    not_taken: list[str] = field(default_factory=list)
    known: bool = False
    doubtful: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    last: str = ""


def shortened(names: list[str]) -> str:
    """The first four of them, and how many more."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


class Watch:
    """Looks at what a model's ``load_weights`` does with the tensors of quantized layers.

    Built once: trainers may send one tensor a call.
    """

    def __init__(self, model: nn.Module) -> None:
        self.experts: dict[str, ExpertLoader] = {}  # by the name of the experts' module
        self.linears: dict[str, LinearLoader] = {}  # by the name of the checkpoint's tensor
        for module in model.modules():
            loader = getattr(module, "quads_loader", None)
            if isinstance(loader, ExpertLoader):
                self.experts[loader.shards.prefix] = loader
            elif loader is not None:
                self.linears.update(dict.fromkeys(module.quads_names, loader))
        self.kept_experts = {
            name: module.num_experts
            for name, module in model.named_modules()
            if name not in self.experts and isinstance(module, FusedMoE)
        }
        self.names = ModelNames(model, self.linears, self.kept_experts)
        self.loaders = {id(x): x for x in (*self.experts.values(), *self.linears.values())}

    def load(
        self,
        load_weights: Callable[..., Any],
        weights: Iterable[tuple[str, torch.Tensor]],
        *args: Any,
    ) -> Any:
        """Call the model's own function; raise for tensors that it passed over.

        Raises:
            ValueError: names tensors of quantized layers that no loader was called with, tensors
                that are named like such ones, or, where no name is known, all of them.
            Exception: the model's own, with the name that it was given last.
        """
        before = self._calls()
        seen = Seen()
        try:
            result = load_weights(self._follow(weights, seen), *args)
        except Exception as error:
            if seen.last not in str(error):
                error.args = (f"{error} (the model got {seen.last} last)",)
            raise
        # Models may load in threads, so only the number of calls at the end is certain.
        calls = self._calls() - before
        if calls < seen.expected:
            raise ValueError(f"no quantized layer has such a weight: {shortened(seen.not_taken)}")
        if seen.unknown and calls == 0 and not seen.known:
            raise ValueError(
                f"no parameter of the model has such a name: {shortened(seen.unknown)}; nothing "
                "was loaded"
            )
        if seen.unknown:
            logger.warning(
                "quads_nvfp4: no parameter of the model has such a name: %s; SGLang skips them",
                shortened(seen.unknown),
            )
        if seen.doubtful:
            logger.warning(
                "quads_nvfp4: neither the model's parameters nor its checkpoint have such a name: "
                "%s; SGLang may skip them",
                shortened(seen.doubtful),
            )
        return result

    def _follow(
        self, weights: Iterable[tuple[str, torch.Tensor]], seen: "Seen"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Hand tensors on; count those that a loader must take, note those that none took."""
        for name, weight in self._unstacked(weights):
            seen.last = name
            experts = self._experts_of(name)
            loader = experts or self.linears.get(name)
            verdict = self.names.judge(name) if loader is None else "quantized"
            if verdict != "quantized":
                seen.known |= verdict != "unknown"
                if verdict != "known":
                    (seen.doubtful if verdict == "doubtful" else seen.unknown).append(name)
                yield name, weight
                continue
            before = self._calls() if loader is None else loader.calls
            if experts is not None and weight.ndim == 3 and self._load_stack(experts, name, weight):
                seen.expected += experts.calls - before
                continue
            seen.expected += 1
            yield name, weight
            # The model asks for the next one.
            if before == (self._calls() if loader is None else loader.calls):
                seen.not_taken.append(f"{name} {list(weight.shape)}")

    def _load_stack(self, loader: ExpertLoader, name: str, weight: torch.Tensor) -> bool:
        """Whether the name is that of a stack of all experts; loads it if so."""
        tail = name.removeprefix(loader.shards.prefix).removesuffix(".weight")
        if tail not in STACKS:
            return False
        loader.load_stack(weight, STACKS[tail], name)
        return True

    def _unstacked(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stacks of experts that stay as they are, one expert after the other.

        Raises:
            ValueError: a stack of other experts than the module's, or experts that the model
                knows under other names.
        """
        for name, weight in weights:
            prefix, _, tail = name.removesuffix(".weight").rpartition(".")
            count = self.kept_experts.get(prefix)
            stack = STACKS.get(f".{tail}") if count is not None else None
            if stack is None:
                yield name, weight
                continue
            if weight.ndim != 3 or weight.shape[0] != count:
                raise ValueError(f"{name}: expected {count} experts, got {list(weight.shape)}")
            if not self.names.takes_experts_alone(prefix):
                raise ValueError(f"{name}: send the experts of this model one by one")
            halves = {"down_proj": weight}
            if stack == "w13":
                gate, up = weight.chunk(2, dim=1)
                halves = {"gate_proj": gate, "up_proj": up}
            for projection, each in halves.items():
                for i, expert in enumerate(each):
                    yield f"{prefix}.{i}.{projection}.weight", expert

    def _experts_of(self, name: str) -> ExpertLoader | None:
        prefix, experts, _ = name.rpartition(".experts.")
        return self.experts.get(f"{prefix}.experts") if experts else None

    def _calls(self) -> int:
        return sum(loader.calls for loader in self.loaders.values())
