"""Prepared modules: the module's own class, with a forward that reads effective weights.

Only ``__class__`` changes. Parameter objects, names, the state dict, hooks and ``isinstance`` stay.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from quads_common.qat.weight import PREPARED, QatWeight

__all__ = ["EXPERT_STACKS", "QatExperts", "QatLinear", "is_expert_stack", "restore", "swap"]

# The first stack of an experts module (with or without a gate), and the last.
EXPERT_STACKS = (("gate_up_proj", "up_proj"), ("down_proj",))

_classes: dict[type[nn.Module], type[nn.Module]] = {}


class QatLinear(nn.Module):
    """Mixin: a linear layer whose forward uses the effective weight; activations are untouched."""

    _quads_qat: dict[str, QatWeight] | None = None
    bias: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self._quads_qat is None:
            output: torch.Tensor = super().forward(input)
            return output
        weight = self._quads_qat["weight"].effective(_autocast_dtype(input.device.type))
        return F.linear(input, weight, self.bias)  # [..., K] @ [K, N] -> [..., N]


class QatExperts(nn.Module):
    """Mixin: stacked experts of transformers 5.

    The class's own forward runs, on a view of the module whose stacks are the effective ones. It
    asks transformers' registry of experts implementations, so whatever the model has selected
    (``eager``, ``grouped_mm``, ...), now or later, computes with them.
    """

    _quads_qat: dict[str, QatWeight] | None = None
    _quads_base: type[nn.Module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._quads_qat is None:
            return super().forward(*args, **kwargs)
        stacks = {name: weight.effective() for name, weight in self._quads_qat.items()}
        return self._quads_base.forward(_View(self, stacks), *args, **kwargs)


class _View:
    """A module with some attributes replaced; for as long as one forward."""

    def __init__(self, module: nn.Module, replaced: dict[str, torch.Tensor]) -> None:
        self._module = module
        for name, value in replaced.items():  # one by one: Dynamo of torch 2.11 knows no update
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def is_expert_stack(module: nn.Module) -> bool:
    """Whether the module holds 3-D parameters of the names that transformers 5 gives experts."""
    return all(
        any(getattr(module._parameters.get(name), "ndim", 0) == 3 for name in names)
        for names in EXPERT_STACKS
    )


def swap(module: nn.Module, weights: dict[str, QatWeight]) -> None:
    """Make the module compute with the effective values of ``weights`` (by parameter name)."""
    mixin = QatLinear if isinstance(module, nn.Linear) else QatExperts
    module.__class__ = _prepared_class(mixin, type(module))
    setattr(module, PREPARED, weights)


def restore(module: nn.Module) -> None:
    """Undo ``swap``. A class that was derived since (fully_shard does so) stays, without effect."""
    if PREPARED in module.__dict__:
        delattr(module, PREPARED)
    if "_quads_base" in vars(type(module)):
        module.__class__ = vars(type(module))["_quads_base"]


def _prepared_class(mixin: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """One class for each base, so that equal modules stay of one type."""
    if base not in _classes:
        attributes: dict[str, Any] = {
            "_quads_base": base,
            "__module__": base.__module__,
            "__doc__": base.__doc__,
        }
        attributes["__reduce_ex__"] = lambda self, protocol: (_rebuild, (mixin, base), vars(self))
        _classes[base] = type(f"Qat{base.__name__}", (mixin, base), attributes)
    return _classes[base]


def _rebuild(mixin: type[nn.Module], base: type[nn.Module]) -> nn.Module:
    """An empty module of a prepared class, which pickle cannot find by name."""
    module: nn.Module = object.__new__(_prepared_class(mixin, base))
    return module


def _autocast_dtype(device: str) -> torch.dtype | None:
    """What autocast would cast the weight to, so that it is decoded to that at once; or None."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
