"""``fake_quantize_experts``: values, given maxima, refusals. Two ranks: see test_distributed."""

import pytest
import torch

from quads_common import fake_quantize
from quads_common.qat import fake_quantize_experts
from tests.common.bits import assert_same_bits


def weights(*lead, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(2)
    w13 = torch.randn(*lead, 64, 32, generator=generator).to(dtype)
    w2 = torch.randn(*lead, 32, 48, generator=generator).to(dtype)
    return w13, w2


@pytest.mark.parametrize("rule", ["pow2", "te"])
@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "stack"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_fake_quantize(lead, dtype, rule):
    w13, w2 = weights(*lead, dtype=dtype)
    first, second = fake_quantize_experts(w13, w2, global_scale_rule=rule)
    assert_same_bits(first, fake_quantize(w13, global_scale_rule=rule), "w13")
    assert_same_bits(second, fake_quantize(w2, global_scale_rule=rule), "w2")


def test_given_amax_is_used_and_spares_the_hook():
    w13, w2 = weights(3)
    amax13, amax2 = torch.tensor([5.0, 6e5, 7.0]), torch.tensor([8e5, 9.0, 10.0])
    first, second = fake_quantize_experts(
        w13, w2, w13_amax=amax13, w2_amax=amax2, amax_hook=lambda amax: pytest.fail("called")
    )
    assert_same_bits(first, fake_quantize(w13, amax=amax13), "w13")
    assert_same_bits(second, fake_quantize(w2, amax=amax2), "w2")
    assert not torch.equal(first, fake_quantize(w13))


def test_hook_gets_the_maxima_of_this_rank_once():
    w13, w2 = weights(3)
    seen = []
    w2_amax = torch.tensor([4e5, 5e5, 6e5])

    def hook(amax):
        seen.append(amax.clone())
        return amax * 1e5

    first, second = fake_quantize_experts(w13, w2, w2_amax=w2_amax, amax_hook=hook)
    (amax,) = seen
    assert_same_bits(amax[0], w13.abs().amax(dim=(1, 2)).float(), "w13")
    assert_same_bits(amax[1], w2.abs().amax(dim=(1, 2)).float(), "w2")
    assert_same_bits(first, fake_quantize(w13, amax=amax[0] * 1e5), "w13")
    assert_same_bits(second, fake_quantize(w2, amax=w2_amax), "w2")


@pytest.mark.parametrize("given", [False, True], ids=["own", "given"])
@pytest.mark.parametrize("which", ["w13", "w2"])
def test_nan_raises_or_poisons(which, given):
    pair = dict(zip(("w13", "w2"), weights(3), strict=True))
    pair[which][1, 2, 3] = float("nan")
    options = {f"{which}_amax": torch.full((3,), 9.0)} if given else {}
    with pytest.raises(ValueError, match=rf"layer\.{which}\[1\]: NaN or Inf"):
        fake_quantize_experts(**pair, **options, name="layer")
    values = fake_quantize_experts(**pair, **options, check_finite=False)
    bad = values[which == "w2"].isnan()
    assert bad[1].sum() == (16 if given else bad[1].numel()) and bad.sum() == bad[1].sum()
    assert not values[which == "w13"].isnan().any()


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (((2, 64, 24), (2, 32, 48)), {}, r"layer\.w13 \[2, 64, 24\].*K = 24"),
        (((2, 64, 32), (2, 32, 40)), {}, r"layer\.w2 \[2, 32, 40\].*K = 40"),
        (((2, 64, 32), (3, 32, 48)), {}, "same number of experts"),
        (((2, 64, 32), (2, 32, 48)), {"w2_amax": torch.ones(3)}, r"w2_amax must have shape \[2\]"),
        (((2, 64, 32), (2, 32, 48)), {"global_scale_rule": "x"}, "global_scale_rule 'x'"),
    ],
    ids=["w13-k", "w2-k", "experts", "amax", "rule"],
)
def test_refused(shapes, options, message):
    w13, w2 = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ValueError, match=message):
        fake_quantize_experts(w13, w2, name="layer", **options)


def test_wrong_dtype_is_refused():
    w13, w2 = weights(2)
    with pytest.raises(TypeError, match="float64"):
        fake_quantize_experts(w13.double(), w2)
