"""The straight-through rule against explicit formulas, and a gradient for every input."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from quads_common import fake_quantize
from quads_common.qat import cached_quantization, fake_quantize_experts, prepare_qat
from quads_common.qat.ops import effective_weight, matrix_amax
from tests.common.bits import assert_same_bits
from tests.qat import tiny_models

DTYPES = (torch.bfloat16, torch.float32)
DENSE = {"targets": ["linear"]}


class OneLinear(nn.Module):
    def __init__(self, dtype, bias=True):
        super().__init__()
        self.o_proj = nn.Linear(64, 48, bias=bias, dtype=dtype)

    def forward(self, x):
        return self.o_proj(x)


@pytest.mark.parametrize("cached", [False, True], ids=["anew", "cached"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_gradients_are_the_explicit_ones(dtype, cached):
    """dX = dY @ W_eff, dW = dY.T @ X to the master, db = sum dY."""
    model = prepare_qat(OneLinear(dtype), DENSE)
    x = torch.randn(10, 64, dtype=dtype, requires_grad=True)
    dy = torch.randn(10, 48, dtype=dtype)
    if cached:
        with cached_quantization(model):
            model(x)
            y = model(x)
    else:
        y = model(x)
    y.backward(dy)
    weight, bias = model.o_proj.weight, model.o_proj.bias
    values = fake_quantize(weight.detach())
    assert_same_bits(y.detach(), F.linear(x.detach(), values, bias.detach()), "y")
    # Products of float64, so the order of sums does not count; one rounding of the result does.
    bound = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-20}[dtype]
    for got, expected, what in (
        (x.grad, dy.double() @ values.double(), "dX = dY @ W_eff"),
        (weight.grad, dy.double().T @ x.detach().double(), "dW = dY.T @ X"),
        (bias.grad, dy.double().sum(0), "db = sum dY"),
    ):
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < bound, f"{what}: relative error {error:.1e}, {bound=:.1e}"
    wrong = dy.double() @ weight.detach().double()
    error = (x.grad.double() - wrong).abs().max() / wrong.abs().max()
    assert error > 4 * bound, f"dY @ W is {error:.1e} away, too close to tell it apart"


@pytest.mark.parametrize("frozen", ["weight", "bias", "x"])
def test_each_input_may_be_frozen(frozen):
    model = prepare_qat(OneLinear(torch.float32), DENSE)
    x = torch.randn(3, 64, requires_grad=frozen != "x")
    if frozen != "x":
        getattr(model.o_proj, frozen).requires_grad_(False)
    model(x).sum().backward()
    gradients = {"weight": model.o_proj.weight.grad, "bias": model.o_proj.bias.grad, "x": x.grad}
    assert {name for name, g in gradients.items() if g is None} == {frozen}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_effective_weight_gradient_is_the_identity(dtype, transposed):
    weight = torch.randn(3, 32, 64, dtype=dtype, requires_grad=True)
    amax = matrix_amax(weight)
    values = effective_weight(weight, amax, dtype=torch.bfloat16, transposed=transposed)
    incoming = torch.randn(3, 32, 64).to(torch.bfloat16)
    values.backward(incoming)
    assert weight.grad.dtype == dtype
    assert_same_bits(weight.grad, incoming.to(dtype), "gradient")
    torch.library.opcheck(
        torch.ops.quads.qat_effective_weight.default,
        (weight, amax, "pow2", transposed, torch.bfloat16),
    )
    torch.library.opcheck(torch.ops.quads.qat_amax.default, (weight.detach(),))


def test_fake_quantize_experts_gradients_are_the_identity():
    w13, w2 = torch.randn(2, 32, 16), torch.randn(2, 16, 16)
    w13.requires_grad_(), w2.requires_grad_()
    first, second = fake_quantize_experts(w13, w2)
    incoming = torch.randn(2, 32, 16), torch.randn(2, 16, 16)
    torch.autograd.backward([first, second], list(incoming))
    assert_same_bits(w13.grad, incoming[0], "w13")
    assert_same_bits(w2.grad, incoming[1], "w2")


def test_saturated_values_get_their_gradient_too():
    """An amax that is too small clips; straight through has no mask."""
    weight = torch.randn(4, 16, requires_grad=True)
    effective_weight(weight, torch.tensor(0.01)).sum().backward()
    assert_same_bits(weight.grad, torch.ones(4, 16), "gradient")


def test_training_lowers_the_loss_and_moves_the_codes():
    model = prepare_qat(tiny_models.moe(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch = tiny_models.tokens()
    losses = []
    for _ in range(8):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0], losses
