"""One captured call of a compensated layer against the formulas in float64.

The oracle and the bounds are those of ``tests.compensation.reference``; the input of w2's quantizer
is taken from the engine once it proved to be a legal rounding of the activation function.
"""

from typing import Any

import numpy as np
import torch

from quads_common.format import QuantizedTensor
from tests.common.reference import ULP, Interval, Matrix
from tests.compensation.reference import Lists, bounded, encode, linear
from tests.vllm.test_served_numerics import check_activation, stored

__all__ = ["check_layers", "linear_weight"]


def lists_of(found: dict[str, Any], group: int, unit: int, rac: bool) -> Lists:
    """The lists of a group from the buffers of a selection; unit: whose columns."""
    hot = [c for c in found["channels"][group].tolist() if c >= 0]
    columns = found["columns"]
    if columns is not None:
        columns = columns[unit].float().numpy()[:, : len(hot)]
    blocks = [b for b in found["blocks"][group].tolist() if b >= 0]
    return Lists(blocks if rac else None, hot, columns)


def check_linear(call: dict[str, Any], weight: QuantizedTensor, rac: bool) -> None:
    """Raise ``AssertionError`` unless the layer's output is legal."""
    lists = lists_of(call["linear"], 0, 0, rac)
    linear(call["x"], Matrix.of(weight), lists).check(call["out"], call["layer"])


def check_moe(call: dict[str, Any], w13: QuantizedTensor, w2: QuantizedTensor, rac: bool) -> None:
    """Raise ``AssertionError`` unless both products and what is between them are legal."""
    ids = call["topk_ids"]
    hit = [e for e in ids.unique().tolist() if e >= 0]
    assert [e for e, _ in call["inner"]] == hit, call["layer"]
    x = call["x"].float().numpy()
    values, errors = np.zeros(x.shape), np.zeros(x.shape)
    for expert, inner in call["inner"]:
        token, slot = np.nonzero(ids.numpy() == expert)
        lists = lists_of(call["w13"], 0, expert, rac)
        y = bounded(encode(x[token], lists), matrix(w13, expert), lists)
        wrong = check_activation(
            expert, {"x": inner}, torch.from_numpy(y.value), torch.from_numpy(y.error)
        )
        assert not wrong, f"{call['layer']}: {wrong}"
        lists = lists_of(call["w2"], expert, expert, rac)
        second = bounded(encode(inner.float().numpy(), lists), matrix(w2, expert), lists)
        router = call["topk_weights"].float().numpy()[token, slot].astype(np.float64)[:, None]
        terms = second.value * router
        roundings = (1 + ids.shape[1]) * ULP * np.abs(terms)
        np.add.at(values, token, terms)
        np.add.at(errors, token, second.error * np.abs(router) + roundings)
    Interval(values, errors).check(call["out"], call["layer"])


def matrix(stack: QuantizedTensor, expert: int) -> Matrix:
    """One expert's weight."""
    return Matrix.of(
        QuantizedTensor(stack.packed[expert], stack.block_scale[expert], stack.global_scale[expert])
    )


def check_layers(calls, units, rac=True):
    """Every captured call of experts and linears is legal."""
    kinds = {"experts": 0, "linears": 0}
    for call in calls:
        if "w13" in call:
            check_moe(call, *stored(units, call["layer"]), rac)
            kinds["experts"] += 1
        else:
            check_linear(call, linear_weight(units, call["layer"]), rac)
            kinds["linears"] += 1
    return kinds


def linear_weight(units, layer):
    """The [N, K] weight of a linear layer as the engine holds it."""
    found = units[f"{layer}[0]"]
    scale = found["block_scale"].view(torch.float8_e4m3fn)
    return QuantizedTensor(found["packed"], scale, found["global_scale"].reshape(()))
