"""Comparisons of the compensated quantizer with ``compensation.operands`` and ``fold``: bits.

Each function yields (name, whether it holds, figures) for a device and model shapes.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from quads_common import quantize
from quads_common.activation import Activation
from quads_common.compensation.fold import fold
from quads_common.compensation.operands import (
    InputCompensation,
    Operands,
    channel_mask,
    compensated_operands,
)
from quads_common.format import QuantizedTensor
from quads_common.kernels.compensated_rows import CompensatedRows, compensate_rows
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.packing import unscaled_values
from quads_common.quantize import activation_global_scale_inv, quantize_blocks
from tests.kernels.compare_gemm import random_ids
from tests.kernels.compare_quantize import natural, same
from tests.kernels.compensated_cases import PRESETS, enlarge_hot, hot_rows, moved
from tests.kernels.exact import random_rows
from tests.kernels.staged import new_gathering, staged_as

Check = tuple[str, bool, str]


def operands(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """The quantizer: every operand, code and scale against the torch code, bit for bit."""
    hidden, inner, experts, top_k = next(iter(shapes.values()))
    generator = torch.Generator().manual_seed(32)
    for name, preset in PRESETS.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype != torch.bfloat16 and (preset.columns or (quick and preset.alpha == 1)):
                continue
            x = hot_rows(5 if quick else 256, hidden, generator, dtype)
            lists = preset.lists(hidden, 1, 4, "cpu")
            if lists.channels is not None:
                enlarge_hot(x, lists.channels, torch.zeros(len(x), dtype=torch.int64))
            x[-1, 7] = torch.nan
            if preset.channels and len(x) > 4:
                x[4, lists.channels[0, 0]] = torch.inf
            yield from one_operand(f"operands {name} {dtype}", x, lists, device)
    for name, preset in PRESETS.items():
        x = random_rows(3 if quick else 64, 2 * inner, generator=generator)
        ids = random_ids(len(x), top_k, experts, generator)
        lists = preset.lists(inner, experts, 4, "cpu")
        slots = x.repeat_interleave(top_k, dim=0)
        yield from expert_operands(f"operands {name} of experts", slots, ids, lists, device)
    for dtype in (torch.bfloat16, torch.float32):
        x = hot_rows(5, hidden, generator, dtype)
        lists = PRESETS["splice rac"].lists(hidden, 1, 4, "cpu")
        odd = torch.empty((5, hidden + 1), dtype=dtype, device=device)[:, 1:]
        odd.copy_(x)
        want = compensated_operands(x, lists)
        got = compensate_rows(odd, moved(lists, device))
        yield f"operands at odd addresses {dtype}", *same_rows(got, want, hidden, False)


def one_operand(
    name: str, x: torch.Tensor, lists: InputCompensation, device: str
) -> Iterator[Check]:
    want = compensated_operands(x, lists)
    staging = new_gathering(len(x), 1, (x.shape[1], 16), x.dtype, device).w13
    got = compensate_rows(x.to(device), moved(lists, device), staging=staging)
    yield f"{name} folded", *same_rows(got, want, x.shape[1], False)
    yield f"{name} kept", *staged_as(staging, x)
    if lists.channels is not None and lists.columns is None and x.dtype == torch.float32:
        return
    got = compensate_rows(x.to(device), moved(lists, device), exact=True, packed=True)
    yield f"{name} exact", *same_rows(got, want, x.shape[1], True)
    cold = x
    if lists.channels is not None:
        cold = torch.where(channel_mask(lists.channels[0], x.shape[1]), 0, x)
    q = quantize(cold, per_token=True)
    assert got.quantized is not None
    yield f"{name} codes", *same(got.quantized, q)
    if lists.block_mask is not None:
        assert got.residual is not None
        yield f"{name} residual codes", *same_residual(got.residual, cold, q, lists)


def same_residual(
    got: QuantizedTensor, cold: torch.Tensor, q: QuantizedTensor, lists: InputCompensation
) -> tuple[bool, str]:
    finite = cold.isfinite().all(dim=1)
    values = cold.float()[finite]
    residual = values - unscaled_values(q.packed, q.block_scale)[finite] * q.global_scale[finite]
    inverse = activation_global_scale_inv(values.abs().amax(dim=1, keepdim=True))
    packed, scale, _ = quantize_blocks(residual, inverse)
    mask = lists.block_mask[0]
    packed = torch.where(mask.repeat_interleave(8), packed, 0)
    scale = torch.where(mask, scale.view(torch.uint8), 0)
    wrong = (got.packed.cpu()[finite] != packed).sum()
    wrong += (got.block_scale.view(torch.uint8).cpu()[finite] != scale).sum()
    return int(wrong) == 0, f"{int(wrong)} bytes differ"


def same_rows(
    got: CompensatedRows, want: Operands, width: int, exact: bool, rows=slice(None)
) -> tuple[bool, str]:
    """Whether operands, row scales and hot values are equal; zeros of either sign are."""
    found, expected = {}, {}
    listed = got.hot is not None
    if exact:
        assert got.parts is not None
        values, scale = got.parts.values[rows], got.parts.row_scale[rows]
        parts = [want.quantized]
        parts += [want.residual] if want.residual is not None else []
        if want.hot is not None and not listed:
            parts.append(spread(want, width))
        for i, part in enumerate(parts):
            found[f"part {i}"], expected[f"part {i}"] = natural(values[:, i], width), part
        padding = values[:, :, :, width // 8 :]
        expected["scale"] = want.row_scale
    else:
        assert got.operand is not None and got.operand.row_scale is not None
        values, scale = got.operand.values[rows], got.operand.row_scale[rows]
        folded = fold(replace(want, hot=None, channels=None) if listed else want)
        found["folded"], expected["folded"] = natural(values, width), folded.values
        padding = values[:, :, width // 8 :]
        expected["scale"] = folded.row_scale
    found["scale"] = scale[:, None]
    if listed:
        found["hot"], expected["hot"] = got.hot[rows], want.hot
    wrong = {n: differing(found[n], expected[n]) for n in found}
    wrong["padding"] = int((padding != 0).sum())
    return not any(wrong.values()), f"differ: {wrong}"


def differing(got: torch.Tensor, want: torch.Tensor) -> int:
    """NaN equals NaN, and zeros of either sign are equal."""
    got, want = got.float().cpu(), want.float().cpu()
    return int(((got != want) & ~(got.isnan() & want.isnan())).sum())


def spread(operands: Operands, width: int) -> torch.Tensor:
    """Hot values at their places in rows of zeros."""
    assert operands.hot is not None and operands.channels is not None
    full = torch.zeros((operands.hot.shape[0], width + 1))
    places = torch.where(operands.channels < 0, width, operands.channels).long()
    return full.index_copy(1, places, operands.hot)[:, :width]


def expert_operands(
    name: str, slots: torch.Tensor, ids: torch.Tensor, lists: InputCompensation, device: str
) -> Iterator[Check]:
    """With an activation in front and the list of each slot's expert."""
    activation = Activation()
    ids[0, 0] = -1
    chosen = lists.block_mask if lists.block_mask is not None else lists.channels
    assert chosen is not None
    routes = Routes(ids.to(device), None, len(chosen))
    options: dict = {"activation": activation, "routes": routes}
    y = slots.to(device)
    inner = quantize_rows(y, activation=activation, operand=False, product=True).product.cpu()
    tokens, top_k = ids.shape
    local = torch.where(ids < len(chosen), ids, -1)
    for exact in (False, True):
        staging = new_gathering(tokens, top_k, (16, inner.shape[1]), y.dtype, device).w2
        got = compensate_rows(y, moved(lists, device), exact=exact, staging=staging, **options)
        by_token = inner.reshape(tokens, top_k, -1)
        yield f"{name} {exact=} kept", *staged_as(staging, by_token, local)
        results = []
        for expert in ids.unique().tolist():
            if expert >= 0:
                mine = (ids.flatten() == expert).nonzero().flatten()
                want = compensated_operands(inner[mine], lists, expert)
                results.append(same_rows(got, want, inner.shape[1], exact, mine))
        bad = [text for ok, text in results if not ok]
        yield f"{name} {'exact' if exact else 'folded'}", not bad, "; ".join(bad[:2])
