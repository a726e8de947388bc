"""``fused_moe_compensated`` against float64 on the oracle's codes, and against ``fused_moe``."""

import dataclasses

import pytest
import torch

from quads_common import fused_moe, quantize
from quads_common.activation import Activation
from quads_common.compensation import InputCompensation, fused_moe_compensated
from quads_common.compensation.operands import gather_columns
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import VARIANTS, matrices, routing
from tests.common.reference import CheckedActivation
from tests.common.samples import normal
from tests.compensation import reference
from tests.compensation.reference import Lists

EXPERTS, HIDDEN, INNER = 5, 64, 48
NOTHING = InputCompensation()
HOT13 = [3, 17, 40]
# Per expert: blocks and hot channels of w2's input, all different, one of each empty.
BLOCKS2 = [[0], [1, 2], [], [0, 2], [0, 1, 2]]
HOT2 = [[5], [], [0, 47], [16, 17, 31], [9]]


class Experts:
    """Weights of w13 with few significant bits, so that GEMM1's sums are exact in float32."""

    def __init__(self, variant: str = "silu", dtype=torch.bfloat16) -> None:
        self.activation, self.formula = VARIANTS[variant]
        rows = 2 * INNER if self.activation.gated else INNER
        codes = torch.randint(-2, 3, (EXPERTS, rows, HIDDEN)).float()
        codes[:, :, ::16] = 6.0
        self.w13_original = codes * torch.logspace(-2, 0, EXPERTS, 2).view(-1, 1, 1) / 16
        self.w2_original = normal(EXPERTS, HIDDEN, INNER, seed=1)
        self.w13, self.w2 = quantize(self.w13_original), quantize(self.w2_original)
        self.w13_bias = normal(EXPERTS, rows, seed=2, dtype=dtype)
        self.w2_bias = normal(EXPERTS, HIDDEN, seed=3, dtype=dtype)
        self.dtype = dtype

    def tokens(self, count: int) -> torch.Tensor:
        x = normal(count, HIDDEN, seed=4, dtype=torch.float32).clamp(-2, 2)
        x[:, HOT13] *= 16
        return (x * 8).round().div(8).to(self.dtype)

    def run(self, x, weights, ids, w13_input=NOTHING, w2_input=NOTHING, **options):
        options = {
            "activation": self.activation,
            "w13_bias": self.w13_bias,
            "w2_bias": self.w2_bias,
            **options,
        }
        return fused_moe_compensated(
            x, self.w13, self.w2, weights, ids, w13_input=w13_input, w2_input=w2_input, **options
        )

    def reference(self, x, weights, ids, w13_lists, w2_lists):
        return reference.moe(
            x,
            matrices(self.w13, self.w13_bias),
            matrices(self.w2, self.w2_bias),
            weights,
            ids,
            CheckedActivation(self.activation, self.formula),
            w13_lists,
            w2_lists,
        )


def per_expert(lists: list[list[int]], slots: int) -> torch.Tensor:
    return torch.tensor([row + [-1] * (slots - len(row)) for row in lists], dtype=torch.int32)


def both_inputs(e: Experts, rac: bool, splice: bool, bf16: bool, alpha: float = 1.0):
    """The lists as the code takes them and as the reference does."""
    w13 = InputCompensation(alpha=alpha)
    w2 = InputCompensation(alpha=alpha)
    plain = [Lists(alpha=alpha)] * EXPERTS
    ref13, ref2 = plain, plain
    if rac:
        mask = torch.zeros(EXPERTS, INNER // 16, dtype=torch.bool)
        for expert, blocks in enumerate(BLOCKS2):
            mask[expert, blocks] = True
        w13 = dataclasses.replace(w13, block_mask=torch.tensor([[True, False, False, True]]))
        w2 = dataclasses.replace(w2, block_mask=mask)
        ref13 = [dataclasses.replace(r, blocks=[0, 3]) for r in ref13]
        ref2 = [dataclasses.replace(r, blocks=b) for r, b in zip(ref2, BLOCKS2, strict=True)]
    if splice:
        w13 = dataclasses.replace(w13, channels=per_expert([HOT13], 4))
        w2 = dataclasses.replace(w2, channels=per_expert(HOT2, 4))
        ref13 = [dataclasses.replace(r, hot=HOT13) for r in ref13]
        ref2 = [dataclasses.replace(r, hot=h) for r, h in zip(ref2, HOT2, strict=True)]
    if bf16:
        w13 = dataclasses.replace(w13, columns=stacked(e.w13_original, w13.channels))
        w2 = dataclasses.replace(w2, columns=stacked(e.w2_original, w2.channels))
        ref13, ref2 = kept(ref13, e.w13_original), kept(ref2, e.w2_original)
    return w13, w2, ref13, ref2


def stacked(weight, channels):
    lists = channels.expand(EXPERTS, -1)
    return torch.stack([gather_columns(w, c) for w, c in zip(weight, lists, strict=True)])


def kept(lists: list[Lists], weight: torch.Tensor) -> list[Lists]:
    values = weight.to(torch.bfloat16).float().numpy()
    return [
        dataclasses.replace(entry, columns=values[e][:, entry.hot]) for e, entry in enumerate(lists)
    ]


PRESETS = {
    "rac": (True, False, False),
    "splice": (False, True, False),
    "splice-bf16": (False, True, True),
    "splice-then-rac": (True, True, False),
    "splice-bf16-then-rac": (True, True, True),
}


@pytest.mark.parametrize("variant", ["silu", "swigluoai-limit-2", "relu2_no_mul"])
def test_without_compensation_equals_fused_moe_bit_for_bit(variant):
    e = Experts(variant)
    x, (weights, ids) = e.tokens(48), routing(48, 2, EXPERTS)
    ids[::7, 1] = -1
    want = fused_moe(
        x, e.w13, e.w2, weights, ids,
        activation=e.activation, w13_bias=e.w13_bias, w2_bias=e.w2_bias,
    )  # fmt: skip
    assert_same_bits(e.run(x, weights, ids), want, variant)


def test_without_compensation_and_biases_in_float16():
    e = Experts(dtype=torch.float16)
    x, (weights, ids) = e.tokens(16), routing(16, 3, EXPERTS)
    want = fused_moe(x, e.w13, e.w2, weights, ids)
    assert_same_bits(e.run(x, weights, ids, w13_bias=None, w2_bias=None), want, "float16")


@pytest.mark.parametrize("variant", ["silu", "relu2_no_mul"])
@pytest.mark.parametrize("preset", PRESETS)
def test_compensated_within_the_accumulation_bound(preset, variant):
    e = Experts(variant)
    x, (weights, ids) = e.tokens(48), routing(48, 2, EXPERTS)
    ids[::7, 1] = -1
    w13, w2, ref13, ref2 = both_inputs(e, *PRESETS[preset])
    got = e.run(x, weights, ids, w13, w2)
    e.reference(x, weights, ids, ref13, ref2).check(got, f"{preset} {variant}")


def test_alpha_one_half():
    e = Experts()
    x, (weights, ids) = e.tokens(32), routing(32, 2, EXPERTS)
    w13, w2, ref13, ref2 = both_inputs(e, True, True, False, alpha=0.5)
    e.reference(x, weights, ids, ref13, ref2).check(e.run(x, weights, ids, w13, w2), "alpha 0.5")


CONTROLS = {
    "w13-only": lambda w13, w2: (w13, NOTHING),
    "w2-only": lambda w13, w2: (NOTHING, w2),
    "lists-of-the-next-expert": lambda w13, w2: (
        w13,
        dataclasses.replace(w2, block_mask=w2.block_mask.roll(1, 0)),
    ),
    "channels-of-the-next-expert": lambda w13, w2: (
        w13,
        dataclasses.replace(w2, channels=w2.channels.roll(1, 0)),
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_the_bound_notices_wrong_lists(control):
    e = Experts()
    x, (weights, ids) = e.tokens(48), routing(48, 2, EXPERTS)
    w13, w2, ref13, ref2 = both_inputs(e, True, True, False)
    want = e.reference(x, weights, ids, ref13, ref2)
    with pytest.raises(AssertionError, match="outside the bound"):
        want.check(e.run(x, weights, ids, *CONTROLS[control](w13, w2)), control)


def test_bf16_columns_are_the_experts_own():
    e = Experts()
    x, (weights, ids) = e.tokens(48), routing(48, 2, EXPERTS)
    w13, w2, ref13, ref2 = both_inputs(e, False, True, True)
    want = e.reference(x, weights, ids, ref13, ref2)
    rolled = dataclasses.replace(w13, columns=w13.columns.roll(1, 0))
    with pytest.raises(AssertionError, match="outside the bound"):
        want.check(e.run(x, weights, ids, rolled, w2), "columns of another expert")


def test_expert_parallel_ranks_add_up():
    """Each rank computes the terms of its experts, with the lists of its experts."""
    e = Experts(dtype=torch.float32)
    x, (weights, ids) = e.tokens(32), routing(32, 2, EXPERTS)
    w13, w2, _, _ = both_inputs(e, True, True, False)
    whole = e.run(x, weights, ids, w13, w2, w13_bias=None, w2_bias=None)
    total = torch.zeros_like(whole)
    for mine in ([0, 3], [1, 2, 4]):
        expert_map = torch.full((EXPERTS,), -1)
        expert_map[mine] = torch.arange(len(mine))
        local = [type(q)(*(t[mine] for t in vars(q).values())) for q in (e.w13, e.w2)]
        total += fused_moe_compensated(
            x, *local, weights, ids, activation=e.activation, expert_map=expert_map, w13_input=w13,
            w2_input=InputCompensation(w2.block_mask[mine], w2.channels[mine]),
        )  # fmt: skip
    assert float((total - whole).abs().max()) <= 2**-21 * float(whole.abs().max())


def test_router_weight_on_input_scales_and_rounds_x_first():
    e = Experts()
    x, (weights, ids) = e.tokens(24), routing(24, 1, EXPERTS)
    w13, w2, _, _ = both_inputs(e, True, True, False)
    got = e.run(x, weights, ids, w13, w2, apply_router_weight_on_input=True)
    scaled = (x.float() * weights).to(x.dtype)
    assert_same_bits(got, e.run(scaled, torch.ones(24, 1), ids, w13, w2), "scaled input")
    with pytest.raises(ValueError, match=r"apply_router_weight_on_input.*\b2\b"):
        e.run(x, *routing(24, 2, EXPERTS), w13, w2, apply_router_weight_on_input=True)


def test_a_bad_token_touches_no_other():
    e = Experts()
    x, (weights, ids) = e.tokens(8), routing(8, 2, EXPERTS)
    w13, w2, _, _ = both_inputs(e, True, True, False)
    good = e.run(x, weights, ids, w13, w2)
    for channel in (HOT13[0], 50):
        y = x.clone()
        y[3, channel] = float("nan")
        got = e.run(y, weights, ids, w13, w2)
        assert got[3].isnan().all()
        others = [i for i in range(8) if i != 3]
        assert_same_bits(got[others], good[others], f"nan in channel {channel}")


def test_defaults_and_shapes():
    e = Experts()
    x, (weights, ids) = e.tokens(4), routing(4, 2, EXPERTS)
    both = {"w13_input": NOTHING, "w2_input": NOTHING}
    got = fused_moe_compensated(x, e.w13, e.w2, weights, ids, **both)
    assert_same_bits(got, fused_moe(x, e.w13, e.w2, weights, ids), "defaults")
    with pytest.raises(ValueError, match="x must be"):
        e.run(x[:, :48], weights, ids)
    with pytest.raises(ValueError, match="needs w2"):
        e.run(x, weights, ids, activation=Activation("relu2_no_mul"))
    lists = both_inputs(e, True, True, False)[:2]
    assert e.run(x[:0], weights[:0], ids[:0], *lists).shape == (0, HIDDEN)
