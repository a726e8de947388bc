"""Inputs of the quantizer tests: random distributions and blocks made for the edges."""

from collections.abc import Callable

import torch

from tests.common.oracle import E4M3

RANDOM_SHAPE = (512, 1024)  # 2^19 values for each distribution, 9 of them: 4.7 million
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
TIE_VALUES = (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)  # what each rounds to


def _normal(g: torch.Generator) -> torch.Tensor:
    return torch.randn(RANDOM_SHAPE, generator=g)


def _uniform(g: torch.Generator) -> torch.Tensor:
    return torch.rand(RANDOM_SHAPE, generator=g)


def _one_outlier(g: torch.Generator) -> torch.Tensor:
    x = 0.02 * _normal(g)
    x[77, 900] = -40.0
    return x


def _any_bits(g: torch.Generator) -> torch.Tensor:
    bits = torch.randint(-(2**15), 2**15, RANDOM_SHAPE, generator=g).to(torch.int16)
    x = bits.view(torch.bfloat16).float()
    return torch.where(x.isfinite() & (x.abs() <= 3e38), x, 0.0)


DISTRIBUTIONS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "normal-1": _normal,
    "normal-0.02": lambda g: 0.02 * _normal(g),
    "normal-1e-8": lambda g: 1e-8 * _normal(g),
    "heavy-tail": lambda g: _normal(g) / _uniform(g).clamp(min=1e-6),
    "uniform": lambda g: 2 * _uniform(g) - 1,
    "lognormal": lambda g: (3 * _normal(g)).exp() * _normal(g).sign(),
    "sparse": lambda g: _normal(g) * (_uniform(g) < 0.03),
    "one-outlier": _one_outlier,
    "any-bits": _any_bits,
}


def random_bf16(distribution: str) -> torch.Tensor:
    """[512, 1024] bf16 of one of ``DISTRIBUTIONS``, always the same values."""
    generator = torch.Generator().manual_seed(20261130)
    return DISTRIBUTIONS[distribution](generator).to(torch.bfloat16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Standard normal values of any shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def scale_ladder() -> torch.Tensor:
    """[1, 128 * 16] float32 of amax 2688: block b has the amax 6 * E4M3 value b, the last 2688.

    So its global scale is 1 under every rule, and block b gets scale byte b.
    """
    blocks = torch.zeros(128, 16)
    blocks[:127, 5] = 6 * torch.from_numpy(E4M3).float()
    blocks[127, 11] = -2688.0
    return blocks.reshape(1, -1)


def tie_ladder() -> torch.Tensor:
    """``scale_ladder`` with both signs of every tie in every block but the last: [1, 128 * 16]."""
    blocks = scale_ladder().reshape(128, 16)
    both_signs = torch.tensor([sign * tie for tie in TIES for sign in (1, -1)])
    scales = torch.from_numpy(E4M3).float()
    blocks[:127, 0] = 6 * scales
    blocks[:127, 1] = 0.0
    blocks[:127, 2:] = scales[:, None] * both_signs
    return blocks.reshape(1, -1)


def neighbours(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[3, ...]: each value's predecessor, itself and its successor in magnitude, in ``dtype``."""
    integers = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
    bits = x.to(dtype).view(integers[dtype])
    moved = torch.where(x == 0, 0, 1).to(bits.dtype)
    return torch.stack([bits - moved, bits, bits + moved]).view(dtype)
