"""A parameter under QAT: its effective value in a forward, computed anew or kept by ``cache``."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from quads_common.format import GlobalScaleRule
from quads_common.qat.ops import effective_weight, matrix_amax

__all__ = ["QatWeight", "prepared_weights"]

PREPARED = "_quads_qat"  # attribute of a prepared module: parameter name -> QatWeight


@dataclass(eq=False)
class QatWeight:
    """One parameter of a prepared module. The module keeps it; nothing is copied.

    name: the module's checkpoint name. owner, attribute: where the parameter is.
    group: the modules whose parameters share one amax, the owner among them.
    transposed: the parameter is [..., K, N], not [..., N, K].
    amax: its own in the latest forward, for the check that follows. caching, kept: see ``cache``.
    """

    name: str
    owner: nn.Module
    attribute: str
    group: tuple[nn.Module, ...]
    rule: GlobalScaleRule
    transposed: bool = False
    amax: torch.Tensor | None = field(default=None, repr=False)
    caching: bool = field(default=False, repr=False)
    kept: "_Kept | None" = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps no values: the cache that would renew them knows the original only."""
        return {**self.__dict__, "amax": None, "caching": False, "kept": None}

    @property
    def parameter_name(self) -> str:
        """Name in the model's state dict."""
        return f"{self.name}.{self.attribute}"

    def parameter(self, module: nn.Module | None = None) -> torch.Tensor:
        """The parameter as the module (default: the owner) holds it now."""
        weight: torch.Tensor = getattr(module or self.owner, self.attribute)
        return weight

    def effective(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight, in ``dtype`` or the parameter's; its gradient is the parameter's.

        Raises:
            NotImplementedError: a parameter of the group is a DTensor while the owner runs.
        """
        members = [self.parameter(module) for module in self.group]
        for member in members:
            self._check_whole(member)
        weight = self.parameter()
        dtype = dtype or weight.dtype
        if not self.caching or torch.compiler.is_compiling():
            return self._quantized(weight, members, dtype)
        state = (dtype, torch.is_inference_mode_enabled(), *(_state(m) for m in members))
        if self.kept is None or self.kept.state != state:
            with torch.no_grad():
                values = self._quantized(weight, members, dtype)
            self.kept = _Kept(state, [(m, m.detach()) for m in members], values, self.amax)
        else:
            self.amax = self.kept.amax  # so that bad values are noticed in every forward
        kept: torch.Tensor = _StraightThrough.apply(weight, self.kept.values)
        return kept

    def _quantized(
        self, weight: torch.Tensor, members: list[torch.Tensor], dtype: torch.dtype
    ) -> torch.Tensor:
        amax = self._group_amax(weight, members)
        return effective_weight(
            weight, amax, rule=self.rule, dtype=dtype, transposed=self.transposed
        )

    def _group_amax(self, weight: torch.Tensor, members: list[torch.Tensor]) -> torch.Tensor:
        own = matrix_amax(weight)
        if not torch.compiler.is_compiling():
            self.amax = own
        others = [matrix_amax(m) for m in members if m is not weight]
        return torch.stack([own, *others]).amax(dim=0) if others else own

    def _check_whole(self, member: torch.Tensor) -> None:
        if hasattr(member, "full_tensor"):
            raise NotImplementedError(
                f"{self.parameter_name}: a parameter that shares its scale is a DTensor in the "
                f"forward, so its amax is not at hand. Under fully_shard, put all "
                f"{len(self.group)} modules that share the scale into one unit; for tensor "
                "parallel weights call fake_quantize_experts with an amax_hook"
            )


@dataclass(eq=False)
class _Kept:
    """An effective weight, and what it was made from.

    state: what tells that it is still right. sources: the parameters and aliases of their memory,
    held so that neither identity nor address can come again for something else.
    """

    state: tuple[Any, ...]
    sources: list[tuple[torch.Tensor, torch.Tensor]]
    values: torch.Tensor
    amax: torch.Tensor | None


def _state(parameter: torch.Tensor) -> tuple[int, int, int]:
    return id(parameter), parameter.data_ptr(), parameter._version


class _StraightThrough(torch.autograd.Function):
    """Values computed earlier from ``weight``, with the gradient of ``ops.effective_weight``."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ctx.weight_dtype = weight.dtype
        return values.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.to(ctx.weight_dtype), None  # values hold no graph of their own


def prepared_weights(model: nn.Module) -> list[QatWeight]:
    """Every parameter under QAT, in the order of the model's modules."""
    return [
        weight
        for module in model.modules()
        for weight in (getattr(module, PREPARED, None) or {}).values()
    ]
