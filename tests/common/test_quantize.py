"""``quantize`` against the oracle, byte for byte: random values, edges, every scale and tie."""

import numpy as np
import pytest
import torch

from quads_common import dequantize, fake_quantize, quantize
from tests.common import oracle
from tests.common.bits import assert_equals_oracle, assert_same_bits, to_numpy
from tests.common.samples import (
    DISTRIBUTIONS,
    TIE_VALUES,
    neighbours,
    normal,
    random_bf16,
    scale_ladder,
    tie_ladder,
)

RULES = ("pow2", "te")
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_weight(x: torch.Tensor, rule: str, what: str = "") -> None:
    q = quantize(x, global_scale_rule=rule)
    assert_equals_oracle(q, oracle.quantize_weight(to_numpy(x), rule), f"{what} {rule}")


def check_tokens(x: torch.Tensor, what: str = "") -> None:
    q = quantize(x, per_token=True)
    assert_equals_oracle(q, oracle.quantize_tokens(to_numpy(x)), f"{what} per token")


def check_all(x: torch.Tensor, what: str = "") -> None:
    for rule in RULES:
        check_weight(x, rule, what)
    check_tokens(x, what)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_quantize_random_weights(distribution, rule):
    check_weight(random_bf16(distribution), rule, distribution)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_quantize_random_tokens(distribution):
    check_tokens(random_bf16(distribution), distribution)


def test_random_weights_are_at_least_four_million():
    count = sum(random_bf16(d).numel() for d in DISTRIBUTIONS)
    assert count >= 4_000_000, f"{count} values"


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
def test_quantize_input_dtypes(dtype):
    """float32 values that bfloat16 cannot hold: weights round first, activations do not."""
    x = normal(128, 512, dtype=torch.float32) * torch.logspace(-3, 3, 128).unsqueeze(1)
    check_all(x.to(dtype), str(dtype))


def test_quantize_rounds_float32_weights_to_bf16_first():
    x = normal(64, 256, dtype=torch.float32)
    q, rounded = quantize(x), quantize(x.to(torch.bfloat16))
    assert_same_bits(q.packed, rounded.packed, "packed codes of float32 and of its bfloat16")
    tokens, rounded = quantize(x, per_token=True), quantize(x.to(torch.bfloat16), per_token=True)
    differ = int((tokens.packed != rounded.packed).sum())
    assert differ > 0, "activations must not be rounded to bfloat16, yet no byte differs"


@pytest.mark.parametrize("rule", RULES)
def test_quantize_takes_the_amax_after_rounding_to_bf16(rule):
    """1.3126 rounds to 1.3125 = 2688 / 2^11: one step of the pow2 scale, one of the te scale."""
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([1.3126, 0.7, -0.1])
    check_weight(x, rule)
    scale = quantize(x, global_scale_rule=rule).global_scale.item()
    assert scale == 2.0**-11, f"global scale {scale}, expected 2^-11 = {2.0**-11}"


@pytest.mark.parametrize("exponent", [0, -5, -89, 60, 100], ids="2^{}".format)
@pytest.mark.parametrize("step", [0, 1, 2], ids=["below", "exact", "above"])
def test_quantize_every_scale(step, exponent):
    """All 127 finite scales, and the scales that one bfloat16 step of the block amax leads to."""
    x = neighbours(scale_ladder(), torch.bfloat16)[step]
    x[0, -16:] = scale_ladder()[0, -16:]
    check_all(x * 2.0**exponent, f"scales {step=}")


def test_quantize_reaches_all_scale_bytes():
    scales = quantize(scale_ladder()).block_scale.view(torch.uint8)[0, :127]
    assert scales.tolist() == list(range(127))


def test_quantize_rounds_block_scales_to_even():
    """Block amaxes at, just below and just above every midpoint of two scales (float32 tokens)."""
    midpoints = torch.from_numpy((oracle.E4M3[1:] + oracle.E4M3[:-1]) / 2).float()
    blocks = torch.zeros(127, 16)
    blocks[:126, 3] = 6 * midpoints
    blocks[126, 0] = 2688
    for dtype in (torch.float32, torch.bfloat16):
        for step, x in enumerate(neighbours(blocks.reshape(1, -1), dtype)):
            x[0, -16:] = blocks[126]
            check_all(x, f"midpoints {step=} {dtype}")


@pytest.mark.parametrize("exponent", [0, 7, -60, 100], ids="2^{}".format)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("step", [0, 1, 2], ids=["below", "exact", "above"])
def test_quantize_every_tie(step, dtype, exponent):
    """Both signs of all 7 ties under all 126 positive scales, and the values right beside them."""
    x = neighbours(tie_ladder(), dtype)[step]
    x.view(128, 16)[:, 0] = tie_ladder().view(128, 16)[:, 0].to(dtype)
    x[0, -16:] = tie_ladder()[0, -16:].to(dtype)
    check_all(x * 2.0**exponent, f"ties {step=}")


def test_quantize_sends_ties_to_the_even_code():
    """Literals. Not under scales 15/8 * 2^n: there fl32(1 / scale) lifts three of the ties."""
    q = quantize(tie_ladder())
    codes = oracle.unpack(q.packed.numpy()).reshape(128, 16)[:127, 2:]
    scale_bytes = q.block_scale.view(torch.uint8).numpy()[0, :127]
    chosen = (scale_bytes > 0) & (oracle.E4M3 * 2.0**20 % 15 != 0)
    assert chosen.sum() == 112
    expected = np.array([sign * value for value in TIE_VALUES for sign in (1, -1)])
    wrong = oracle.E2M1[codes[chosen]] != expected
    assert not wrong.any(), (
        f"{wrong.sum()} ties wrong, columns {np.unique(np.argwhere(wrong)[:, 1])}"
    )


def amax_sweep() -> torch.Tensor:
    """Every power of two and 1.3125 times it from 1e-38 to 3e38, their neighbours, and 1e-30's."""
    exponents = torch.arange(-127, 128, dtype=torch.float64)
    grid = torch.cat([2**exponents, 1.3125 * 2**exponents, 1.7 * 2**exponents])
    special = torch.tensor([1e-38, 1e-30, 2e-30, 3e38, 2688, 448, 6, 1e-31], dtype=torch.float64)
    grid = torch.cat([grid, special]).float()
    grid = neighbours(grid.to(torch.bfloat16), torch.bfloat16).flatten().float()
    return grid[(grid >= 1e-38) & (grid <= 3e38)]


def matrices_of_amax(amax: torch.Tensor) -> torch.Tensor:
    """[E, 4, 64] float32 whose matrices have the given amaxes, and so does every row."""
    x = normal(4, 64, dtype=torch.float32)
    x = (x / x.abs().amax(dim=1, keepdim=True)).unsqueeze(0) * amax.view(-1, 1, 1)
    x[:, :, 7] = -amax.unsqueeze(1)
    return x


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_quantize_amax_from_1e_minus_38_to_3e38(dtype):
    amax = amax_sweep()
    assert amax.numel() > 1500 and amax.min() < 1.2e-38 and amax.max() > 2.9e38
    check_all(matrices_of_amax(amax).to(dtype), f"amax sweep {dtype}")


def test_quantize_takes_an_amax_below_1e_minus_30_for_zero():
    """The float32 values on either side of 1e-30, as rows; their bfloat16 neighbours as weights."""
    floor = torch.tensor([1e-30]).view(torch.int32)
    amax = torch.cat([floor - 1, floor, floor + 1]).view(torch.float32)
    q = quantize(matrices_of_amax(amax)[:, 0], per_token=True)
    assert (q.global_scale[:, 0] == 1).tolist() == [True, False, False]
    assert (q.packed == 0).all(dim=1).tolist() == [True, False, False]
    amax = neighbours(torch.tensor([1e-30]), torch.bfloat16).flatten().float()
    is_zero = (amax.double() < 1e-30).tolist()
    assert is_zero == [True, True, False]  # 1e-30 itself rounds down in bfloat16
    q = quantize(matrices_of_amax(amax))
    assert (q.global_scale == 1).tolist() == is_zero
    assert (q.packed == 0).flatten(1).all(dim=1).tolist() == is_zero


def edge_blocks() -> dict[str, torch.Tensor]:
    zero = torch.zeros(4, 64)
    outlier, subnormal, underflow, signed = (zero.clone() for _ in range(4))
    outlier[1, 17] = 5.0
    subnormal[:] = 2.0**-130 * torch.arange(64)
    subnormal[2, 0] = 1.0
    underflow[:, 0::16] = torch.logspace(-9, 0, 16).view(4, 4)
    underflow[:, 1::16] = -1e-9
    signed[0, :20] = torch.tensor([-0.0, -1e-9, 1e-9, 0.0]).repeat(5)
    signed[0, 4] = 1.0
    return {
        "zero": zero,
        "negative-zero": -zero,
        "one-outlier": outlier,
        "subnormal": subnormal,
        "all-subnormal": subnormal
        * (torch.arange(64) % 16 != 0)
        * torch.tensor([[1], [1], [0], [1]]),
        "scale-underflow": underflow,
        "signed-zeros": signed,
    }


@pytest.mark.parametrize("dtype", INPUT_DTYPES, ids=str)
@pytest.mark.parametrize("case", edge_blocks())
def test_quantize_edge_blocks(case, dtype):
    x = edge_blocks()[case].to(dtype)
    check_all(x, case)
    for per_token in (False, True):
        values = fake_quantize(x, per_token=per_token)
        assert values.isfinite().all(), f"{case}: {int((~values.isfinite()).sum())} not finite"


def test_quantize_flushes_block_scales_at_the_underflow_threshold():
    """Under global scale 1 the scale of amax 6 * 2^-10 is a tie and goes to 0; above it is 2^-9."""
    for step, scale_byte in enumerate((0, 0, 1)):
        x = torch.zeros(1, 32)
        x[0, 0] = neighbours(torch.tensor(6 * 2.0**-10), torch.bfloat16)[step]
        x[0, 1] = -0.0
        x[0, 16] = 2688
        q = quantize(x)
        assert q.block_scale.view(torch.uint8)[0, 0] == scale_byte, f"{step=}"
        first = q.packed[0, 0].item()
        assert first == (0x00, 0x00, 0x85)[step], f"{step=}: {first:#x}, -0.0 beside {x[0, 0]}"
        assert dequantize(q)[0, 1:16].abs().sum() == 0
