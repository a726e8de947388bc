"""Shards quantized with the full tensor's amax, put together, are the whole tensor's bytes."""

import pytest
import torch

from quads_common import dequantize, quantize
from quads_common.format import QuantizedTensor, check_block_aligned
from quads_common.quantize import weight_amax, weight_global_scale_inv
from tests.common import oracle
from tests.common.bits import (
    assert_equals_oracle,
    assert_same_bits,
    assert_same_quantized,
    to_numpy,
)
from tests.common.samples import normal

RULES = ("pow2", "te")


def outlier_weight(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[512, 1024], N(0, 0.02), one 4.0 in column 900: only the last shards along K see it."""
    x = 0.02 * normal(512, 1024, dtype=torch.float32)
    x[100, 900] = 4.0
    return x.to(dtype)


def join(shards: list[QuantizedTensor], dim: int) -> QuantizedTensor:
    """Concatenate shards that agree on the global scale."""
    scales = {float(s.global_scale) for s in shards}
    assert len(scales) == 1, f"shards have global scales {scales}"
    return QuantizedTensor(
        torch.cat([s.packed for s in shards], dim=dim),
        torch.cat([s.block_scale.view(torch.uint8) for s in shards], dim=dim).view(
            torch.float8_e4m3fn
        ),
        shards[0].global_scale,
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", [0, 1], ids=["along-N", "along-K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_shards_with_the_full_amax_equal_the_whole(dtype, dim, parts, rule):
    x = outlier_weight(dtype)
    shards = [
        quantize(s, amax=weight_amax(x), global_scale_rule=rule) for s in x.chunk(parts, dim=dim)
    ]
    whole = quantize(x, global_scale_rule=rule)
    assert_same_quantized(join(shards, dim), whole, f"{parts} shards")


def test_shards_with_their_own_amax_differ():
    """The control: without the full amax, shards without the outlier get another global scale."""
    scales = [quantize(s).global_scale.item() for s in outlier_weight().chunk(2, dim=1)]
    assert scales[0] != scales[1]


@pytest.mark.parametrize("rule", RULES)
def test_raw_float32_amax_equals_weight_amax(rule):
    """A trainer's float32 master has an amax that bfloat16 rounds; both name the same scale."""
    x = normal(16, 64, dtype=torch.float32) * 0.1
    x[3, 4] = 1.3126  # rounds to 1.3125, where the pow2 scale steps
    raw = x.abs().amax()
    assert raw != weight_amax(x)
    got = quantize(x[:8], amax=raw, global_scale_rule=rule)
    expected = quantize(x[:8], amax=weight_amax(x), global_scale_rule=rule)
    assert_same_quantized(got, expected)


@pytest.mark.parametrize("rule", RULES)
def test_experts_equal_expert_by_expert(rule):
    sizes = torch.tensor([1.0, 1e-3, 0.0, 900.0, 1e-31]).view(5, 1, 1)
    x = (normal(5, 32, 64, dtype=torch.float32) * sizes).to(torch.bfloat16)
    stacked = quantize(x, global_scale_rule=rule)
    assert_equals_oracle(stacked, oracle.quantize_weight(to_numpy(x), rule))
    for e in range(5):
        got = QuantizedTensor(stacked.packed[e], stacked.block_scale[e], stacked.global_scale[e])
        assert_same_quantized(got, quantize(x[e], global_scale_rule=rule), f"expert {e}")


@pytest.mark.parametrize("parts", [2, 4])
def test_expert_shards_with_the_full_amax_equal_the_whole(parts):
    x = normal(3, 64, 128) * torch.tensor([1.0, 7.0, 0.01]).view(3, 1, 1).to(torch.bfloat16)
    whole = quantize(x)
    for dim in (1, 2):
        shards = [quantize(s, amax=weight_amax(x)) for s in x.chunk(parts, dim=dim)]
        joined = torch.cat([s.packed for s in shards], dim=dim)
        assert_same_bits(joined, whole.packed, f"{parts} parts along {dim}")


@pytest.mark.parametrize("ratio", [0.1, 1.0, 10.0], ids="up-over-gate-{}".format)
def test_fused_siblings_share_one_global_scale(ratio):
    """gate and up quantized alone with the pair's amax equal the fused [gate | up] tensor."""
    gate, up = 0.02 * normal(32, 64), 0.02 * ratio * normal(32, 64, seed=1)
    amax = torch.maximum(weight_amax(gate), weight_amax(up))
    joined = join([quantize(gate, amax=amax), quantize(up, amax=amax)], 0)
    assert_same_quantized(joined, quantize(torch.cat([gate, up])), f"{ratio=}")


def test_qkv_of_different_sizes_share_one_global_scale():
    parts = [normal(n, 64, seed=n) * s for n, s in ((64, 1), (16, 0.05), (16, 4))]
    parts = [p.to(torch.bfloat16) for p in parts]
    amax = torch.stack([weight_amax(p) for p in parts]).amax()
    joined = join([quantize(p, amax=amax) for p in parts], 0)
    assert_same_quantized(joined, quantize(torch.cat(parts)))


WHOLE_BLOCKS = [(1856, 4, 29), (2880, 4, 45), (29568, 8, 231), (768, 8, 6)]
HALF_BLOCKS = [(1856, 8, 232), (2880, 8, 360)]


@pytest.mark.parametrize(("inner", "tp", "blocks"), WHOLE_BLOCKS, ids=str)
def test_shards_of_any_parity_of_blocks(inner, tp, blocks):
    x = normal(4, inner)
    shards = [quantize(s, amax=weight_amax(x)) for s in x.chunk(tp, dim=1)]
    assert shards[0].block_scale.shape[1] == blocks
    assert_same_quantized(join(shards, 1), quantize(x))


@pytest.mark.parametrize(("inner", "tp", "size"), HALF_BLOCKS, ids=str)
def test_shards_that_split_a_block_are_refused(inner, tp, size):
    x = normal(4, inner)
    message = rf"down_proj.*\b{size}\b.*\b16\b"
    with pytest.raises(ValueError, match=message):
        quantize(x.chunk(tp, dim=1)[0], amax=weight_amax(x), name="down_proj")
    with pytest.raises(ValueError, match=message):
        check_block_aligned(size, "down_proj")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weight_amax_is_the_oracles(dtype):
    x = normal(3, 8, 32, dtype=dtype)
    expected = oracle.round_to_bf16(abs(to_numpy(x)).max(axis=(1, 2)))
    got = weight_amax(x)
    assert got.dtype == torch.float32
    assert_same_bits(got, expected, "amax")
    assert weight_amax(x[:, :0]).tolist() == [0, 0, 0]
    assert weight_amax(x[0, 0]).shape == ()


@pytest.mark.parametrize("rule", RULES)
def test_weight_global_scale_inv_is_the_oracles(rule):
    amax = torch.rand(3000, dtype=torch.float64) * 76 - 38
    amax = torch.cat([10**amax, torch.tensor([0.0, 1e-30, 1.3125, 1.3126, 2688])]).float()
    amax = torch.cat([amax, amax.to(torch.bfloat16).float()])
    expected = [oracle.encode_scale(a, rule) for a in amax.numpy()]
    got = weight_global_scale_inv(amax, rule)
    assert_same_bits(got, oracle.np.array(expected, oracle.F32), rule)


def test_a_full_amax_below_the_shards_own_saturates_at_448_and_6():
    """Whatever the caller claims, nothing becomes NaN, even if the cast to E4M3 does not clamp."""
    x = torch.tensor([[100.0, 3.0] + [0.0] * 14], dtype=torch.bfloat16)
    cast = torch.Tensor.to

    def unclamped_cast(self, *args, **kwargs):
        out = cast(self, *args, **kwargs)
        if torch.float8_e4m3fn in args and self.is_floating_point():
            overflow = self.abs() > 464  # what torch before 2.12 casts to NaN
            out = torch.where(overflow, 0x7F, out.view(torch.uint8)).view(torch.float8_e4m3fn)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", unclamped_cast)
        q = quantize(x, amax=torch.tensor(1.0))
    assert q.block_scale.view(torch.uint8).item() == 0x7E
    assert dequantize(q)[0, 0].item() == 2688 / 2**11
