"""Fingerprints of what a prepared model computes with, to hold against those of an engine."""

from collections.abc import Iterator

import torch
from torch import nn

from quads_common.fingerprint import fingerprint
from quads_common.qat.names import expert_matrix
from quads_common.qat.weight import QatWeight, prepared_weights
from quads_common.quantize import quantize, weight_amax

__all__ = ["fingerprints"]


@torch.no_grad()
def fingerprints(model: nn.Module) -> dict[str, str]:
    """Fingerprint of every quantized matrix under the names that engines use.

    ``<experts module>.<e>.w13`` is an expert's [2I, H], rows [gate | up], and ``.w2`` its [H, I],
    whatever the layout in the model. A linear has its own module name, each member of a fused group
    too (quantized with the group's amax). Under ``fully_shard`` every rank must call it: the full
    weights are gathered, one parameter at a time.

    Raises:
        ValueError: the model is not prepared, or a weight holds NaN or Inf.
    """
    weights = prepared_weights(model)
    if not weights:
        raise ValueError("the model is not prepared: call prepare_qat first")
    result: dict[str, str] = {}
    for weight in weights:
        for name, matrix, amax in _matrices(weight):
            q = quantize(matrix, amax=amax, global_scale_rule=weight.rule, name=name)
            result[name] = fingerprint(q)
    return result


def _matrices(weight: QatWeight) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, [N, K] and shared amax of each matrix that the parameter holds or completes."""
    full = {module: _full(weight.parameter(module)) for module in weight.group}
    own = full[weight.owner]
    if own.ndim == 3:
        for e, matrix in enumerate(_canonical(weight, own)):
            kind = "w2" if weight.attribute == "down_proj" else "w13"
            yield f"{weight.name}.{e}.{kind}", matrix, weight_amax(matrix)
        return
    amax = torch.stack([weight_amax(matrix) for matrix in full.values()]).amax()
    name = expert_matrix(weight.name)
    if not name.endswith(".w13") or name == weight.name:
        yield name, own, amax
    elif weight.owner is weight.group[0]:  # gate and up are one matrix, named once
        yield name, torch.cat(list(full.values())), amax


def _canonical(weight: QatWeight, stack: torch.Tensor) -> torch.Tensor:
    """[E, N, K] of a stack, rows [gate | up]."""
    matrices = stack.mT if weight.transposed else stack
    concatenated = getattr(weight.owner, "is_concatenated", True)
    if weight.attribute == "gate_up_proj" and not concatenated:
        matrices = torch.cat([matrices[:, 0::2], matrices[:, 1::2]], dim=1)
    return matrices


def _full(parameter: torch.Tensor) -> torch.Tensor:
    gather = getattr(parameter, "full_tensor", None)
    full: torch.Tensor = parameter.detach() if gather is None else gather().detach()
    return full
