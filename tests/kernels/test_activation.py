"""The text of the fast SiLU, executed: exact quotients from the approximations that a GPU makes."""

import numpy as np
import pytest
import torch

from quads_common.kernels._activation import SILU
from tests.kernels import ptx

ALL_ONES = 2**23 - 1
LOG2_E = np.float32(1.4426950408889634)


def every(dtype: torch.dtype) -> np.ndarray:
    """All values of a type of 16 bits, as float32."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    return bits.view(dtype).float().numpy()


def off_by(ulps: int, x: np.ndarray) -> np.ndarray:
    """float32 values moved by so many places, where that leaves them finite and normal."""
    moved = (x.view(np.int32) + np.int32(ulps)).view(np.float32)
    good = np.isfinite(moved) & (np.abs(x) > np.finfo(np.float32).tiny) & np.isfinite(x)
    return np.where(good & (x != 1), moved, x)


def exponential(t: np.ndarray, ulps: int) -> np.ndarray:
    """2^t as an instruction gives it that is exact only at 0 and wrong by ``ulps`` elsewhere."""
    return off_by(ulps, ptx.flushed(np.exp2(t.astype(np.float64)).astype(np.float32)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reciprocal_ulps", [-1, 0, 1])
@pytest.mark.parametrize("exponential_ulps", [-2, 0, 2])
def test_fast_silu_divides_exactly(monkeypatch, exponential_ulps, reciprocal_ulps, dtype):
    """Whatever ex2 and rcp are off by, the quotient is that of IEEE division, -0.0 included.

    But for divisors whose mantissa is all ones the reciprocal must be right: the division of every
    GPU rests on that too, which is the same instructions.
    """

    def ex2(bits):
        return exponential(ptx.flushed(bits.view(np.float32)), exponential_ulps).view(np.uint32)

    def rcp(bits):
        exact = ptx.flushed(np.float32(1) / ptx.flushed(bits.view(np.float32)))
        all_ones = bits & np.uint32(ALL_ONES) == ALL_ONES
        return np.where(all_ones, exact, off_by(reciprocal_ulps, exact)).view(np.uint32)

    monkeypatch.setitem(ptx.INSTRUCTIONS, "ex2.approx.ftz.f32", ex2)
    monkeypatch.setitem(ptx.INSTRUCTIONS, "rcp.approx.ftz.f32", rcp)
    x = every(dtype)
    with np.errstate(all="ignore"):
        (got,) = ptx.execute(SILU.value, [x.view(np.uint32)], 1)
        want = x / (np.float32(1) + exponential(-x * LOG2_E, exponential_ulps))
    nan = np.isnan(got.view(np.float32))
    assert np.array_equal(nan, np.isnan(want) | (x == np.inf))
    wrong = x[~nan & (got != want.view(np.uint32))]
    assert wrong.size == 0, f"{wrong.size} quotients differ, first of {wrong[:4]}"
