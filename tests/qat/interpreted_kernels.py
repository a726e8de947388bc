"""Compares the QAT kernels with their torch twins in Triton's stock interpreter.

    TRITON_INTERPRET=1 PYTHONPATH=common:. python -m tests.qat.interpreted_kernels

Prints the number of comparisons; a difference ends it with an error. Given ``cuda`` as argument,
and without the variable, it runs at the sizes of a model on a GPU.
"""

import os
import sys
from collections.abc import Iterable, Iterator

import torch

from quads_common.format import WEIGHT_AMAX_MAX
from quads_common.qat.effective import (
    effective_weight_ref,
    effective_weight_triton,
    matrix_amax_ref,
    matrix_amax_triton,
)
from tests.common.bits import assert_same_bits
from tests.common.samples import DISTRIBUTIONS, neighbours, random_bf16, tie_ladder

RULES = ("pow2", "te")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MODEL = (32, 1536, 2048)  # a quarter of w13 of Qwen3-30B-A3B


def weights(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and weight [E, N, K] or [N, K], of every dtype, shape class and block class."""
    for name in DISTRIBUTIONS:
        x = random_bf16(name)
        yield name, x[:8, :256] if device == "cpu" else x
    ties = tie_ladder()
    yield "ties", ties
    yield "ties' neighbours in bfloat16", neighbours(ties, torch.bfloat16)
    yield "ties' neighbours in float32", neighbours(ties, torch.float32)
    generator = torch.Generator().manual_seed(1)
    for dtype in DTYPES:
        x = torch.randn(3, 5, 48, generator=generator)
        x[1] *= 100
        x[2] = 0
        x[0, 0, :16], x[0, 1, :16], x[0, 2, 3] = 0, 1e-9, -0.0
        yield f"stack {dtype}", x.to(dtype)
    x = torch.randn(2, 16, 32, generator=generator)
    yield "not contiguous", x.to(torch.bfloat16).transpose(1, 2)
    yield "empty", x[:0]
    yield "largest", torch.full((2, 16), -WEIGHT_AMAX_MAX).to(torch.bfloat16)
    above = torch.randn(2, 4, 32, generator=generator)
    above[1, 2, 20] = torch.finfo(torch.bfloat16).max
    yield "above the largest", above
    yield "rounds to infinity", torch.full((2, 16), torch.finfo(torch.float32).max)
    for value in ("nan", "inf", "-inf"):
        bad = x.clone()
        bad[1, 3, 5] = float(value)
        yield value, bad
        yield f"{value} bf16", bad.to(torch.bfloat16)
    if device == "cuda":
        yield "model size", torch.randn(MODEL, dtype=torch.bfloat16, device=device) * 0.02
        yield "model size float32", torch.randn(MODEL, device=device) * 0.02


def main(device: str) -> int:
    """Return how many comparisons were made."""
    return compare(device, weights(device))


def compare(device: str, named: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Compare the kernels with their twins on these weights, moved to a device; their number."""
    count = 0
    for name, weight in named:
        weight = weight.to(device)
        amax = matrix_amax_ref(weight)
        assert_same_bits(matrix_amax_triton(weight).cpu(), amax.cpu(), f"{name}: amax")
        # The second is an amax that its holder does not know of: NaN blocks, saturation, rounding.
        for given in (amax, torch.full_like(amax, 1.2345), torch.full_like(amax, -2.0)):
            for rule in RULES:
                for dtype in (torch.bfloat16, torch.float32):
                    got = effective_weight_triton(weight, given, rule, dtype)
                    expected = effective_weight_ref(weight, given, rule, dtype)
                    assert got.dtype == dtype and got.is_contiguous()
                    assert_same_bits(got.cpu(), expected.cpu(), f"{name} {rule} {dtype}")
                    count += 1
    return count


if __name__ == "__main__":
    on_gpu = sys.argv[1:] == ["cuda"]
    if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1, or give the argument cuda")
    torch.set_num_threads(1)
    print(main("cuda" if on_gpu else "cpu"), "comparisons, all equal")
