"""``dequantize`` and ``fake_quantize``: exactness, one rounding, what a second round changes."""

import numpy as np
import pytest
import torch

from quads_common import dequantize, fake_quantize, quantize
from tests.common import oracle
from tests.common.bits import assert_same_bits, assert_same_quantized, to_numpy
from tests.common.samples import DISTRIBUTIONS, normal, random_bf16, tie_ladder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OPTIONS = {
    "pow2": {},
    "te": {"global_scale_rule": "te"},
    "tokens": {"per_token": True},
    "amax": {"amax": torch.tensor(30000.0)},  # leaves the block scales few bits
}


def oracle_values(x: torch.Tensor, kind: str) -> np.ndarray:
    """float32 [N, K] values that the oracle's codes of a matrix stand for."""
    if kind == "tokens":
        e = oracle.quantize_tokens(to_numpy(x))
    else:
        amax = np.float32(30000) if kind == "amax" else None
        rule = "te" if kind == "te" else "pow2"
        e = oracle.quantize_weight(to_numpy(x), rule, amax)
    return oracle.decode(e.packed, e.scale_bytes, e.global_scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", OPTIONS)
def test_fake_quantize_equals_dequantize_of_quantize(kind, dtype):
    x = normal(64, 128, dtype=dtype)
    values = fake_quantize(x, **OPTIONS[kind])
    assert values.dtype == dtype and values.shape == x.shape
    assert_same_bits(values, dequantize(quantize(x, **OPTIONS[kind]), dtype), f"{kind} {dtype}")
    expected = torch.from_numpy(oracle_values(x, kind)).to(dtype)
    assert_same_bits(values, expected, f"{kind} {dtype} against the oracle")


def test_fake_quantize_of_experts_equals_expert_by_expert():
    x = normal(3, 8, 32) * torch.tensor([1.0, 100.0, 1e-3]).view(3, 1, 1).to(torch.bfloat16)
    for expert in range(3):
        assert_same_bits(fake_quantize(x)[expert], fake_quantize(x[expert]), f"{expert=}")


def test_dequantize_defaults_to_bfloat16():
    assert dequantize(quantize(normal(2, 16, dtype=torch.float32))).dtype == torch.bfloat16


def test_dequantize_rounds_once():
    """Rule te: float32 products that bfloat16 cannot hold, rounded to nearest even."""
    x = normal(64, 128)
    expected = oracle.round_to_bf16(oracle_values(x, "te"))
    got = dequantize(quantize(x, global_scale_rule="te"))
    assert_same_bits(to_numpy(got), expected, "bf16 values")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_dequantize_of_a_weight_is_exact_in_bf16(distribution):
    q = quantize(random_bf16(distribution))
    wide, narrow = dequantize(q, torch.float32), dequantize(q, torch.bfloat16)
    assert wide.isfinite().all()
    assert_same_bits(narrow.float(), wide, distribution)


@pytest.mark.parametrize("exponent", [-60, 0, 60], ids="2^{}".format)
def test_dequantize_of_every_code_and_scale_is_exact_in_bf16(exponent):
    q = quantize(tie_ladder() * 2.0**exponent)
    assert_same_bits(dequantize(q).float(), dequantize(q, torch.float32), f"2^{exponent}")


def survives_requantizing(scale_bytes: torch.Tensor) -> torch.Tensor:
    """Blocks with scale 0 or at least 3 * 2^-9: the largest code of the others need not be 6."""
    return (scale_bytes == 0) | (scale_bytes >= 3)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_requantizing_changes_no_value(distribution):
    q = quantize(random_bf16(distribution))
    first = dequantize(q)
    second = fake_quantize(first)
    kept = survives_requantizing(q.block_scale.view(torch.uint8)).repeat_interleave(16, dim=1)
    changed = int((first != second)[kept].sum())
    assert changed == 0, f"{changed} of {int(kept.sum())} values changed"
    again = quantize(first)
    if again.global_scale == q.global_scale and kept.all():
        assert_same_quantized(again, q, distribution)


def test_requantizing_with_the_same_amax_changes_no_byte():
    """What a trainer ships, quantized by an engine that takes the amax of the original."""
    x = normal(256, 256)
    q = quantize(x)
    again = quantize(dequantize(q, torch.float32), amax=x.abs().amax().float())
    assert_same_quantized(again, q)


@pytest.mark.parametrize("amax", [1352.0, 1376.0, 1392.0])
def test_requantizing_may_halve_the_global_scale_but_no_value_changes(amax):
    """Just above 1344 = 2688 / 2 the amax decodes to 1344, and then takes the next power of two."""
    x = normal(8, 64) * 20
    x[2, 3] = amax
    q = quantize(x)
    again = quantize(dequantize(q))
    assert (q.global_scale.item(), again.global_scale.item()) == (1.0, 0.5)
    assert_same_bits(dequantize(again), dequantize(q), f"values of {amax=}")


@pytest.mark.parametrize(
    ("value", "once", "twice"),
    [(3.25, 3.0, 0.0), (4.0, 4.0, 4.0), (9.5, 8.0, 6.0), (11.0, 12.0, 12.0)],
    ids=lambda v: str(v),
)
def test_requantizing_moves_blocks_under_the_two_smallest_scales(value, once, twice):
    """The exception to "quantizing it again changes nothing"; units of 2^-9 beside amax 2688."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = value * 2.0**-9, 2688
    first = fake_quantize(x)
    second = fake_quantize(first)
    got = [v[0, 0].item() * 2**9 for v in (first, second)]
    assert got == [once, twice]
