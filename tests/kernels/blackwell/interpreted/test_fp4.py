"""The native FP4 layers in Triton's interpreter, at small odd sizes, against torch and float64."""

import dataclasses

import pytest
import torch

from quads_common.compensation import CompensationOptions, Site, new_site_state
from quads_common.compensation.operands import InputCompensation, channel_bits
from quads_common.compensation.ops import quads_linear_compensated, quads_moe_compensated
from quads_common.compensation.selection import write_selection
from quads_common.compensation.staging import new_staging
from quads_common.kernels.blackwell import gemm, linear, moe
from quads_common.kernels.blackwell.gemm import fp4_config, grouped_gemm_fp4
from quads_common.kernels.blackwell.linear import linear_blackwell
from quads_common.kernels.blackwell.moe import fused_moe_blackwell
from quads_common.kernels.blackwell.rows import pack_rows
from quads_common.kernels.route import Routes, make_table
from quads_common.moe import fused_moe
from quads_common.ops import quads_linear, quads_moe
from tests.kernels.blackwell import compare_fp4
from tests.kernels.blackwell.exact_fp4 import one_matrix
from tests.kernels.exact import random_rows, random_weight

GROUPS = [
    compare_fp4.packed_rows,
    compare_fp4.linears,
    compare_fp4.compensated_gemms,
    compare_fp4.refreshes,
    compare_fp4.bad_rows,
    compare_fp4.layers,
]
HIDDEN, INNER, EXPERTS = 160, 48, 4
OPTIONS = CompensationOptions.from_preset(
    "quads_splice", {"splice_count_w13": 16, "splice_count_w2": 16}
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def experts(generator):
    w13 = random_weight(EXPERTS, 2 * INNER, HIDDEN, generator=generator, exact=True)
    return w13, random_weight(EXPERTS, HIDDEN, INNER, generator=generator, exact=True)


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_layers_equal_torch(group):
    checks = list(group("cpu"))
    failed = [f"{name}: {text}" for name, ok, text in checks if not ok]
    print(*(f"{name}: {text}" for name, _, text in checks), sep="\n")
    assert checks
    assert not failed, "\n".join(failed)


def test_ops_run_the_backend_they_name(experts, generator, monkeypatch):
    """And keep the sampled rows as the torch layers do."""
    w13, w2 = experts
    x = random_rows(6, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 3], [1, -1], [3, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)
    router = torch.rand((6, 2), generator=generator)
    weights = (w13.packed, w13.block_scale, w13.global_scale)
    weights += (w2.packed, w2.block_scale, w2.global_scale)
    launched, launch = [], gemm.grouped_gemm_fp4
    for module in (linear, moe):
        monkeypatch.setattr(
            module, "grouped_gemm_fp4", lambda *a, **k: launched.append(1) or launch(*a, **k)
        )
    results = {}
    for backend in ("emulated", "blackwell"):
        states = new_states()
        lists = [
            (s.selection.block_mask, s.selection.channels, s.selection.hot_bits, None)
            for s in states
        ]
        sample_map = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)
        staged = [
            list(new_staging(4, k, width, x.dtype))
            for k, width in ((1, HIDDEN), (2, INNER), (1, HIDDEN))
        ]
        results[backend] = [
            quads_moe(x, *weights, router, ids, None, "silu", None, "nvfp4", False, backend),
            quads_linear(x, *(t[0] for t in weights[:3]), None, "nvfp4", backend),
            quads_moe_compensated(
                x, *weights, router, ids, None, "silu", None, False, *lists[0], *lists[1], 1.0,
                sample_map, staged[0] + staged[1], backend,
            ),
            quads_linear_compensated(
                x, *(t[0] for t in weights[:3]), None, *lists[2], 1.0, sample_map, staged[2],
                backend,
            ),
        ]  # fmt: skip
        assert len(launched) == (6 if backend == "blackwell" else 0)
        results[backend] += [rows for rows, _ in staged]
        assert [groups.tolist() for _, groups in staged] == [
            [0, 0, 0, -1], [0, 1, 2, 1, 1, -1, -1, -1], [0, 0, 0, -1],
        ]  # fmt: skip
    for got, want in zip(results["blackwell"], results["emulated"], strict=True):
        # A GEMM1 output on a rounding boundary can move a row's amax, and so all of its codes.
        assert (got.double() - want.double()).norm() <= 2e-2 * want.double().norm()


def new_states():
    sites = (
        Site("w13", "w13", HIDDEN, HIDDEN),
        Site("w2", "w2", INNER, INNER, 0, tuple(range(EXPERTS)), EXPERTS),
        Site("x", "linear", HIDDEN, HIDDEN),
    )
    states = [new_site_state(site, OPTIONS) for site in sites]
    for i, state in enumerate(states):
        blocks = torch.ones_like(state.selection.block_mask)
        blocks[:, 1] = False
        hot = torch.zeros_like(state.averages.channel, dtype=torch.bool)
        hot[:, [1, 17, 40 + i]] = True
        write_selection(state.selection, blocks, hot)
    return states


def test_no_tokens_and_no_routes(experts, generator):
    x = random_rows(3, HIDDEN, generator=generator)
    ids = torch.full((3, 2), -1, dtype=torch.int32)
    router = torch.rand((3, 2), generator=generator)
    assert (fused_moe_blackwell(x, *experts, router, ids) == 0).all()
    assert fused_moe_blackwell(x[:0], *experts, router[:0], ids[:0]).shape == (0, HIDDEN)
    one = one_matrix(experts[0], 0)
    assert linear_blackwell(x[:0], one).shape == (0, 2 * INNER)
    assert linear_blackwell(x.view(3, 1, HIDDEN), one).shape == (3, 1, 2 * INNER)


def test_lists_without_a_channel_are_plain(experts, generator):
    x = random_rows(3, HIDDEN, generator=generator)
    one = one_matrix(experts[0], 0)
    channels = torch.full((1, 16), -1, dtype=torch.int32)
    lists = InputCompensation(channels=channels, hot_bits=channel_bits(channels, HIDDEN))
    columns = torch.zeros((2 * INNER, 16), dtype=torch.bfloat16)
    lists = dataclasses.replace(lists, columns=columns)
    assert torch.equal(linear_blackwell(x, one, compensation=lists), linear_blackwell(x, one))
    empty = InputCompensation(channels=torch.empty((1, 0), dtype=torch.int32))
    # (g * s) * acc and s * (g * acc) are the same: s is a power of two here.
    assert torch.equal(linear_blackwell(x, one, compensation=empty), linear_blackwell(x, one))


def test_router_weight_on_the_input(experts, generator):
    x = random_rows(3, HIDDEN, generator=generator, exact=True)
    ids = torch.tensor([[2], [0], [2]], dtype=torch.int32)
    router = torch.tensor([[0.5], [2.0], [1.0]])
    options = {"apply_router_weight_on_input": True}
    got = fused_moe_blackwell(x, *experts, router, ids, **options)
    assert torch.equal(got, fused_moe(x, *experts, router, ids, **options))
    with pytest.raises(ValueError, match="needs top_k = 1, got 2"):
        fused_moe_blackwell(x, *experts, router.repeat(1, 2), ids.repeat(1, 2), **options)


def test_unquantized_activations_take_the_other_kernels(experts, generator):
    x = random_rows(3, HIDDEN, generator=generator, exact=True)
    ids = torch.tensor([[2], [0], [1]], dtype=torch.int32)
    router = torch.ones((3, 1))
    got = fused_moe_blackwell(x, *experts, router, ids, act="bf16")
    assert torch.equal(got, fused_moe(x, *experts, router, ids, act="bf16"))
    lists = InputCompensation(torch.ones((1, HIDDEN // 16), dtype=torch.bool))
    with pytest.raises(ValueError, match="compensation is for act='nvfp4', not for 'bf16'"):
        fused_moe_blackwell(x, *experts, router, ids, act="bf16", w13_input=lists)


def test_operands_that_do_not_fit(experts, generator):
    w13, _ = experts
    x = random_rows(3, HIDDEN, generator=generator)
    y = torch.empty((3, 2 * INNER), dtype=x.dtype)
    ids = torch.zeros((3, 1), dtype=torch.int32)
    table = make_table(Routes(ids, None, EXPERTS), 16)
    channels = torch.tensor([[1, 2]], dtype=torch.int32)
    mask = torch.ones((1, HIDDEN // 16), dtype=torch.bool)

    def refuse(message, rows=None, lists=None, block_m=16, table=table):
        with pytest.raises(ValueError, match=message):
            grouped_gemm_fp4(
                pack_rows(x, rows), w13, y, config=fp4_config(block_m, HIDDEN), compensation=lists,
                table=table,
            )  # fmt: skip

    refuse("a routing table is needed for 4 experts", table=None)
    refuse("the table has blocks of 16, the tile 32", block_m=32)
    refuse("a residual and a block mask belong together", lists=InputCompensation(mask))
    bits = channel_bits(channels, HIDDEN)
    lists = InputCompensation(channels=channels, hot_bits=bits)
    refuse("hot values and a list of channels belong together", lists=lists)
    lists = InputCompensation(mask.repeat(3, 1))
    refuse("block_mask has 3 lists: one, or one of each of 4", InputCompensation(mask), lists)
    refuse("block_mask must be bool", lists, lists)
    columns = torch.zeros((4, 96, 2))
    lists = InputCompensation(channels=channels, columns=columns, hot_bits=bits)
    refuse(r"columns must be bf16 \[4, 96, 2\], got torch.float32", lists, lists)
    with pytest.raises(
        ValueError, match=r"spliced channels need bfloat16 inputs, got torch\.float16"
    ):
        pack_rows(x.half(), InputCompensation(channels=channels, hot_bits=bits))
