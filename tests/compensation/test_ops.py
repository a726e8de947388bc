"""The opaque operators: equal to the functions, and statistics that a compiled graph advances."""

import pytest
import torch

from quads_common import quantize
from quads_common.backend import BACKENDS
from quads_common.compensation import (
    CompensationOptions,
    Gathering,
    Site,
    Staging,
    fused_moe_compensated,
    linear_compensated,
    new_site_state,
)
from quads_common.compensation.ops import (
    _layers,
    form_backend,
    quads_linear_compensated,
    quads_moe_compensated,
)
from quads_common.compensation.staging import new_staging
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import routing
from tests.common.samples import normal

HIDDEN, INNER, EXPERTS = 64, 48, 4
OPTIONS = CompensationOptions.from_preset("quads_splice", {"splice_count_linear": 16})
PLACES = 12


def staged(width: int, top_k: int = 1, places: int = PLACES) -> list[torch.Tensor]:
    return list(new_staging(places, top_k, width, torch.bfloat16))


def sampled(tokens: int, seed: int) -> torch.Tensor:
    """The map of a forward, about half of whose tokens are sampled."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(tokens, generator=generator)[: min(PLACES, tokens // 2)]
    sample_map = torch.full((tokens,), -1, dtype=torch.int32)
    sample_map[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    return sample_map


class Linear(torch.nn.Module):
    def __init__(self, counted: bool = True) -> None:
        super().__init__()
        self.q = quantize(normal(32, HIDDEN, seed=1))
        self.state = new_site_state(Site("x", "linear", HIDDEN, HIDDEN), OPTIONS)
        for name, tensor in self.state.buffers().items():
            self.register_buffer(name, tensor, persistent=False)
        self.staged_rows: torch.Tensor
        self.staged_groups: torch.Tensor
        places = PLACES if counted else 0
        for name, tensor in zip(("rows", "groups"), staged(HIDDEN, places=places), strict=True):
            self.register_buffer(f"staged_{name}", tensor, persistent=False)

    def forward(self, x: torch.Tensor, sample_map: torch.Tensor | None) -> torch.Tensor:
        y = quads_linear_compensated(
            x + 1, self.q.packed, self.q.block_scale, self.q.global_scale, None,
            self.selection_block_mask, self.selection_channels, self.selection_hot_bits, None,
            OPTIONS.rac_alpha, sample_map, [self.staged_rows, self.staged_groups], "emulated",
        )  # fmt: skip
        return y * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_a_compiled_linear_keeps_its_rows(backend, counted):
    plain, layer = Linear(counted), Linear(counted)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    selection = plain.state.selection
    for step in range(3):
        x, sample_map = normal(20, HIDDEN, seed=step), sampled(20, step) if counted else None
        staging = Staging(sample_map, *staged(HIDDEN)) if counted else None
        want = linear_compensated(
            x + 1, plain.q, compensation=selection.compensation(OPTIONS, "linear"),
            staging=staging,
        ) * 2  # fmt: skip
        assert_same_bits(compiled(x, sample_map), want, f"{step}")
        if staging is not None:
            assert_same_bits(layer.staged_rows[:10], staging.rows[:10], f"{step} rows")
            assert_same_bits(layer.staged_groups, staging.groups, f"{step} groups")
        for lists in (selection, layer.state.selection):
            lists.block_mask[:, step] = False
            lists.channels[:, step] = 16 * step + 1


def moe_arguments(w13, w2, x, weights, ids, selections, sample_map, buffers):
    lists = [s.selection.compensation(OPTIONS, s.site.kind) for s in selections]
    return (
        x, w13.packed, w13.block_scale, w13.global_scale, w2.packed, w2.block_scale,
        w2.global_scale, weights, ids, None, "silu", None, False,
        lists[0].block_mask, lists[0].channels, lists[0].hot_bits, None,
        lists[1].block_mask, lists[1].channels, lists[1].hot_bits, None,
        1.0, sample_map, buffers, "emulated",
    )  # fmt: skip


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "not counted"])
def test_the_moe_operator_equals_the_function(counted):
    w13 = quantize(normal(EXPERTS, 2 * INNER, HIDDEN, seed=1))
    w2 = quantize(normal(EXPERTS, HIDDEN, INNER, seed=2))
    x, (weights, ids) = normal(24, HIDDEN), routing(24, 2, EXPERTS)
    ids[2, 0] = -1
    sites = (
        Site("w13", "w13", HIDDEN, HIDDEN),
        Site("w2", "w2", INNER, INNER, 0, tuple(range(EXPERTS)), EXPERTS),
    )
    states = [new_site_state(site, OPTIONS) for site in sites]
    states[0].selection.block_mask[:, 1] = False
    states[1].selection.channels[:, 0] = 5
    lists = [s.selection.compensation(OPTIONS, s.site.kind) for s in states]
    a, b = (staged(HIDDEN) + staged(INNER, 2) for _ in range(2))
    sample_map = gathering = None
    if counted:
        sample_map = sampled(24, 1)
        gathering = Gathering(Staging(sample_map, *b[:2]), Staging(sample_map, *b[2:]))
    got = torch.compile(quads_moe_compensated, fullgraph=True, backend="aot_eager")(
        *moe_arguments(w13, w2, x, weights, ids, states, sample_map, a)
    )
    want = fused_moe_compensated(
        x, w13, w2, weights, ids, w13_input=lists[0], w2_input=lists[1], gathering=gathering
    )
    assert_same_bits(got, want, "output")
    for got_buffer, want_buffer in zip(a, b, strict=True):
        assert_same_bits(got_buffer, want_buffer, "rows and groups")
    kept = int((a[3] >= 0).sum())
    assert kept >= 2 * PLACES - 1 if counted else kept == 0


def test_operators_check_out():
    layer = Linear()
    q, selection = layer.q, layer.state.selection
    arguments = (
        normal(5, HIDDEN), q.packed, q.block_scale, q.global_scale, None, selection.block_mask,
        selection.channels, selection.hot_bits, None, 1.0, sampled(5, 0), staged(HIDDEN),
        "emulated",
    )  # fmt: skip
    torch.library.opcheck(quads_linear_compensated, arguments, test_utils="test_faketensor")


def test_other_backends_are_refused_by_name():
    layer = Linear()
    q = layer.q
    with pytest.raises(ValueError, match="backend 'marlin' cannot compensate"):
        quads_linear_compensated(
            normal(5, HIDDEN), q.packed, q.block_scale, q.global_scale, None, None, None, None,
            None, 1.0, None, staged(HIDDEN), "marlin",
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


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "auto"])
@pytest.mark.parametrize("exact", [False, True], ids=["folded", "exact"])
def test_every_backend_compensates(backend, exact):
    if backend != "emulated":
        pytest.importorskip("triton")
    linear, experts = _layers(form_backend(backend, exact))
    assert callable(linear) and callable(experts)
