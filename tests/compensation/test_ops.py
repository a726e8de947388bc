"""The opaque operators: equal to the functions, and statistics that a compiled graph advances."""

import pytest
import torch

from quads_common import quantize
from quads_common.compensation import (
    CompensationOptions,
    Gathering,
    Site,
    fused_moe_compensated,
    linear_compensated,
    new_site_state,
    refresh,
)
from quads_common.compensation.ops import (
    can_compensate,
    form_backend,
    quads_linear_compensated,
    quads_moe_compensated,
)
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import routing
from tests.common.samples import normal

HIDDEN, INNER, EXPERTS = 64, 48, 4
OPTIONS = CompensationOptions.from_preset(
    "quads_splice", {"min_tokens": 4, "sampling_rate": 0.5, "splice_count_linear": 16}
)


def states(*sites: Site):
    found = [new_site_state(site, OPTIONS) for site in sites]
    for state in found:
        state.statistics.enabled.fill_(True)
    return found


def buffers(*found) -> list[torch.Tensor]:
    return [t for state in found for t in state.statistics.buffers().values()]


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = quantize(normal(32, HIDDEN, seed=1))
        (self.state,) = states(Site("x", "linear", HIDDEN, HIDDEN))
        for name, tensor in self.state.buffers().items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: torch.Tensor, row_mask: torch.Tensor) -> torch.Tensor:
        statistics = [getattr(self, f"statistics_{n}") for n in self.state.statistics.buffers()]
        y = quads_linear_compensated(
            x + 1, self.q.packed, self.q.block_scale, self.q.global_scale, None,
            self.selection_block_mask, self.selection_channels, None, OPTIONS.rac_alpha,
            statistics, OPTIONS.sampling_period, row_mask, "emulated",
        )  # fmt: skip
        return y * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_linear_advances_its_statistics(backend):
    plain, layer = Linear(), Linear()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for step in range(3):
        x, mask = normal(20, HIDDEN, seed=step), torch.rand(20) < 0.8
        want = linear_compensated(
            x + 1, plain.q, compensation=plain.state.selection.compensation(OPTIONS, "linear"),
            statistics=plain.state.statistics, period=2, row_mask=mask,
        ) * 2  # fmt: skip
        assert_same_bits(compiled(x, mask), want, f"{step}")
        for name, tensor in plain.state.buffers().items():
            assert_same_bits(layer.state.buffers()[name], tensor, f"{step} {name}")
        refresh([plain.state], OPTIONS)
        refresh([layer.state], OPTIONS)
    assert layer.state.selection.channels.ge(0).all(), "the graph saw new lists"


def moe_arguments(w13, w2, x, weights, ids, found, period):
    lists = [s.selection.compensation(OPTIONS, s.site.kind) for s in found]
    return (
        x, w13.packed, w13.block_scale, w13.global_scale, w2.packed, w2.block_scale,
        w2.global_scale, weights, ids, None, "silu", None, False,
        lists[0].block_mask, lists[0].channels, None, lists[1].block_mask, lists[1].channels, None,
        1.0, buffers(*found), period, None, "emulated",
    )  # fmt: skip


@pytest.mark.parametrize("period", [0, 2])
def test_the_moe_operator_equals_the_function(period):
    w13 = quantize(normal(EXPERTS, 2 * INNER, HIDDEN, seed=1))
    w2 = quantize(normal(EXPERTS, HIDDEN, INNER, seed=2))
    x, (weights, ids) = normal(24, HIDDEN), routing(24, 2, EXPERTS)
    sites = (
        Site("w13", "w13", HIDDEN, HIDDEN),
        Site("w2", "w2", INNER, INNER, 0, tuple(range(EXPERTS)), EXPERTS),
    )
    a, b = states(*sites), states(*sites)
    lists = [s.selection.compensation(OPTIONS, s.site.kind) for s in b]
    for _ in range(2):
        got = torch.compile(quads_moe_compensated, fullgraph=True, backend="aot_eager")(
            *moe_arguments(w13, w2, x, weights, ids, a, period)
        )
        gathering = Gathering(b[0].statistics, b[1].statistics, period) if period else None
        want = fused_moe_compensated(
            x, w13, w2, weights, ids, w13_input=lists[0], w2_input=lists[1], gathering=gathering
        )
        assert_same_bits(got, want, "output")
        for got_buffer, want_buffer in zip(buffers(*a), buffers(*b), strict=True):
            assert_same_bits(got_buffer, want_buffer, "statistics")
        refresh(a, OPTIONS)
        refresh(b, OPTIONS)
    assert (a[0].averages.tokens.item() == 24) == (period == 2)


def test_operators_check_out():
    layer = Linear()
    q, selection = layer.q, layer.state.selection
    arguments = (
        normal(5, HIDDEN), q.packed, q.block_scale, q.global_scale, None, selection.block_mask,
        selection.channels, None, 1.0, buffers(layer.state), 2, None, "emulated",
    )  # fmt: skip
    torch.library.opcheck(quads_linear_compensated, arguments, test_utils="test_faketensor")


def test_other_backends_are_refused_by_name():
    layer = Linear()
    q = layer.q
    with pytest.raises(ValueError, match="backend 'marlin' cannot compensate"):
        quads_linear_compensated(
            normal(5, HIDDEN), q.packed, q.block_scale, q.global_scale, None, None, None, None, 1.0,
            buffers(layer.state), 0, None, "marlin",
        )  # fmt: skip


@pytest.mark.parametrize(
    "backend, exact, called",
    [
        ("triton", True, "triton_exact"),
        ("hopper", True, "hopper_exact"),
        ("hopper", False, "hopper"),
        ("emulated", True, "emulated"),
        ("blackwell", True, "blackwell"),
    ],
)
def test_exact_form_of_a_backend(backend, exact, called):
    assert form_backend(backend, exact) == called
    assert can_compensate(called)
