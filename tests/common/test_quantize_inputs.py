"""What ``quantize`` accepts and refuses: layouts, dtypes, shapes, NaN, empty tensors."""

import math

import pytest
import torch

from quads_common import dequantize, fake_quantize, quantize
from quads_common.quantize import weight_amax, weight_global_scale_inv
from tests.common.bits import assert_same_bits, assert_same_quantized
from tests.common.samples import normal

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def layouts(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of shape [24, 96] that are not contiguous, or start inside their storage."""
    return {
        "transposed": normal(96, 24, dtype=dtype).T,
        "every-second-column": normal(24, 192, dtype=dtype)[:, ::2],
        "every-third-row": normal(72, 96, dtype=dtype)[::3],
        "expanded-row": normal(1, 96, dtype=dtype).expand(24, 96),
        "expanded-column": normal(24, 1, dtype=dtype).expand(24, 96),
        "offset": normal(24, 101, dtype=dtype)[:, 5:],
        "permuted-3d": normal(96, 2, 24, dtype=dtype).permute(1, 2, 0)[1],
        "overlapping": torch.as_strided(normal(400, dtype=dtype), (24, 96), (7, 1)),
    }


@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", layouts(torch.float32))
def test_quantize_ignores_memory_layout(layout, dtype, per_token):
    x = layouts(dtype)[layout]
    expected = quantize(x.clone(memory_format=torch.contiguous_format), per_token=per_token)
    assert_same_quantized(quantize(x, per_token=per_token), expected, layout)


@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_leaves_its_input_alone(dtype, per_token):
    x = normal(32, 64, dtype=dtype)
    x[3, 5], x[4] = -0.0, 0.0
    if per_token:
        x[5, 1], x[6, 2] = math.nan, math.inf
    before = x.clone()
    q = quantize(x, per_token=per_token)
    fake_quantize(x, per_token=per_token)
    weight_amax(x)
    assert_same_bits(x, before, "the input")
    assert x.untyped_storage().data_ptr() != q.packed.untyped_storage().data_ptr()


def test_quantize_leaves_a_given_amax_alone():
    x = normal(4, 32)
    amax = torch.tensor(7.123)
    quantize(x, amax=amax)
    assert amax == torch.tensor(7.123)


@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
@pytest.mark.parametrize("k", [1, 8, 15, 17, 24, 100])
def test_quantize_refuses_a_k_that_cuts_a_block(k, per_token):
    with pytest.raises(ValueError, match=rf"w2\.7.*\b{k}\b.*\b16\b"):
        quantize(normal(3, k), per_token=per_token, name="w2.7")


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn],
    ids=str,
)
def test_quantize_refuses_other_dtypes(dtype):
    x = torch.zeros(2, 16).to(dtype)
    for call in (
        lambda: quantize(x),
        lambda: quantize(x, per_token=True),
        lambda: fake_quantize(x),
        lambda: weight_amax(x),
    ):
        with pytest.raises(TypeError, match=str(dtype)):
            call()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_quantize_refuses_weights_that_are_not_finite(value, dtype):
    for shape, place in (((8, 64), (5, 33)), ((3, 8, 64), (1, 7, 63)), ((16,), (0,))):
        x = normal(*shape, dtype=dtype)
        x[place] = NOT_FINITE[value]
        with pytest.raises(ValueError, match=r"layers\.3\.w1"):
            quantize(x, name="layers.3.w1")
        with pytest.raises(ValueError, match=r"layers\.3\.w1"):
            quantize(x, name="layers.3.w1", amax=torch.full(shape[:-2], 100.0))


@pytest.mark.parametrize("value", [3.397e38, -3.4e38], ids=str)
def test_quantize_refuses_float32_weights_that_overflow_bf16(value):
    x = torch.ones(2, 16)
    x[1, 3] = value
    with pytest.raises(ValueError, match="up_proj"):
        quantize(x, name="up_proj")
    assert quantize(x, per_token=True).global_scale.isfinite().all()


@pytest.mark.parametrize("value", NOT_FINITE)
def test_quantize_refuses_an_amax_that_is_not_finite(value):
    with pytest.raises(ValueError, match="gate_proj"):
        quantize(normal(2, 16), amax=torch.tensor(NOT_FINITE[value]), name="gate_proj")


@pytest.mark.parametrize(
    ("shape", "amax_shape"),
    [((4, 16), (1,)), ((4, 16), (4,)), ((3, 4, 16), ()), ((3, 4, 16), (4,)), ((3, 4, 16), (3, 1))],
    ids=str,
)
def test_quantize_refuses_an_amax_of_another_shape(shape, amax_shape):
    with pytest.raises(ValueError, match=r"amax must have shape") as error:
        quantize(normal(*shape), amax=torch.full(amax_shape, 9.0))
    for text in (str(list(shape[:-2])), str(list(amax_shape))):
        assert text in str(error.value), f"{text} not in {error.value}"


def test_quantize_refuses_weight_options_for_tokens():
    for option in ({"amax": torch.tensor(1.0)}, {"global_scale_rule": "te"}):
        with pytest.raises(ValueError, match="per_token"):
            quantize(normal(2, 16), per_token=True, **option)


def test_quantize_refuses_an_unknown_rule():
    for call in (
        lambda: quantize(normal(2, 16), global_scale_rule="static"),
        lambda: weight_global_scale_inv(torch.tensor(1.0), "static"),
    ):
        with pytest.raises(ValueError, match=r"static.*pow2.*te"):
            call()


@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
def test_quantize_refuses_a_scalar(per_token):
    with pytest.raises(ValueError, match="router"):
        quantize(torch.tensor(1.0), per_token=per_token, name="router")


EMPTY = [(0, 32), (5, 0), (0, 0), (0,), (3, 0, 32), (0, 4, 32), (3, 4, 0), (2, 3, 0, 16)]


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_empty(shape, dtype):
    for per_token in (False, True):
        x = torch.zeros(shape, dtype=dtype)
        q = quantize(x, per_token=per_token)
        assert q.shape == x.shape and q.per_token == per_token
        assert q.packed.dtype == torch.uint8 and q.block_scale.dtype == torch.float8_e4m3fn
        assert q.block_scale.shape == (*shape[:-1], shape[-1] // 16)
        assert q.global_scale.shape == ((*shape[:-1], 1) if per_token else shape[:-2])
        assert (q.global_scale == 1).all(), f"global scale of nothing: {q.global_scale}"
        for out in (dequantize(q, dtype), fake_quantize(x, per_token=per_token)):
            assert out.shape == x.shape and out.dtype == dtype


@pytest.mark.parametrize("shape", [(48,), (1, 16), (2, 3, 5, 32)], ids=str)
def test_quantize_any_number_of_dimensions(shape):
    x = normal(*shape)
    q = quantize(x)
    assert q.global_scale.shape == shape[:-2]
    tokens = quantize(x, per_token=True)
    assert tokens.global_scale.shape == (*shape[:-1], 1)
    flat = quantize(x.reshape(-1, shape[-1]), per_token=True)
    assert_same_bits(tokens.packed.reshape(flat.packed.shape), flat.packed, "packed")
    assert dequantize(q).shape == dequantize(tokens).shape == x.shape


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16], ids=str)
def test_quantize_ignores_the_default_dtype(default):
    x = normal(8, 64)
    expected = quantize(x), quantize(x, global_scale_rule="te"), quantize(x, per_token=True)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = quantize(x), quantize(x, global_scale_rule="te"), quantize(x, per_token=True)
        values = [dequantize(q) for q in got]
    finally:
        torch.set_default_dtype(before)
    for q, want, value in zip(got, expected, values, strict=True):
        assert_same_quantized(q, want, str(default))
        assert_same_bits(value, dequantize(want), f"values under default {default}")


@pytest.mark.parametrize("per_token", [False, True], ids=["weight", "tokens"])
def test_quantize_of_a_parameter_keeps_no_graph(per_token):
    """A graph would keep the float32 intermediates of every quantized weight alive."""
    q = quantize(torch.nn.Parameter(normal(4, 32)), per_token=per_token)
    graphs = [f for f in ("packed", "block_scale", "global_scale") if getattr(q, f).requires_grad]
    assert not graphs, f"{graphs} require gradients"
