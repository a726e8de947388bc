"""Compensation kernels in Triton's interpreter, at small odd sizes, against torch and float64."""

from dataclasses import replace

import pytest
import torch

from quads_common.compensation import CompensationOptions, Site, new_site_state
from quads_common.compensation.ops import quads_linear_compensated, quads_moe_compensated
from quads_common.compensation.selection import write_selection
from quads_common.compensation.staging import StagedInput, Staging, new_staging
from quads_common.kernels import compensated, compensated_rows
from quads_common.kernels.rows import Tile, row_tile
from quads_common.kernels.statistics import count_staged_triton
from tests.kernels import compare_compensated, compare_compensated_rows, compare_statistics
from tests.kernels.compensated_cases import Preset
from tests.kernels.exact import random_rows, random_weight

# H, I, experts, top_k
SHAPES = {"small": (160, 48, 4, 2)}
GROUPS = [
    compare_statistics.statistics,
    compare_compensated_rows.operands,
    compare_compensated.gemms,
    compare_compensated.layers,
    compare_compensated.plain_layers,
    compare_compensated.tiled_layers,
]
OPTIONS = CompensationOptions.from_preset(
    "quads_splice", {"splice_count_w13": 16, "splice_count_w2": 16}
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_kernels_equal_torch(group):
    checks = list(group("cpu", SHAPES, True))
    failed = [f"{name}: {text}" for name, ok, text in checks if not ok]
    assert checks
    assert not failed, "\n".join(failed)


def test_many_rows(monkeypatch):
    """Rows of 41 and 17 blocks, in three and two chunks of 16."""
    monkeypatch.setattr(compensated_rows, "FEW_ROWS", 0)
    assert row_tile(1, 656, 0, compensated_rows.MAX_CHUNKS) == Tile(8, 16, 3)
    shapes = {"chunks": (656, 272, 4, 2)}
    checks = list(compare_compensated_rows.operands("cpu", shapes, True))
    failed = [f"{name}: {text}" for name, ok, text in checks if not ok]
    assert checks
    assert not failed, "\n".join(failed)


def new_states():
    sites = (
        Site("w13", "w13", 160, 160),
        Site("w2", "w2", 48, 48, 0, tuple(range(4)), 4),
        Site("x", "linear", 160, 160),
    )
    states = [new_site_state(site, OPTIONS) for site in sites]
    for i, state in enumerate(states):
        blocks = torch.ones_like(state.selection.block_mask)
        blocks[:, 1] = False
        hot = torch.zeros_like(state.averages.channel, dtype=torch.bool)
        hot[:, [1, 17, 40 + i]] = True
        write_selection(state.selection, blocks, hot)
    return states


def test_ops_run_the_form_they_name(monkeypatch):
    """And keep the sampled rows, whichever it is."""
    generator = torch.Generator().manual_seed(0)
    w13 = random_weight(4, 96, 160, generator=generator, exact=True)
    w2 = random_weight(4, 160, 48, generator=generator, exact=True)
    x = random_rows(6, 160, generator=generator)
    ids = torch.tensor([[0, 3], [1, -1], [3, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)
    router = torch.rand((6, 2), generator=generator)
    weights = (w13.packed, w13.block_scale, w13.global_scale)
    weights += (w2.packed, w2.block_scale, w2.global_scale)
    sample_map = torch.tensor([-1, 2, -1, 0, 1, -1], dtype=torch.int32)
    forms, plain = [], compensated.compensate_rows
    monkeypatch.setattr(
        compensated,
        "compensate_rows",
        lambda *a, **k: forms.append(k["exact"]) or plain(*a, **k),
    )
    results, kept = {}, {}
    for backend in ("emulated", "triton", "triton_exact"):
        states = new_states()
        lists = [
            (s.selection.block_mask, s.selection.channels, s.selection.hot_bits, None)
            for s in states
        ]
        buffers = [new_staging(4, k, width, x.dtype) for k, width in ((1, 160), (2, 48), (1, 160))]
        moe = quads_moe_compensated(
            x, *weights, router, ids, None, "silu", None, False, *lists[0], *lists[1], 1.0,
            sample_map, [*buffers[0], *buffers[1]], backend,
        )  # fmt: skip
        linear = quads_linear_compensated(
            x, *(t[0] for t in weights[:3]), None, *lists[2], 1.0, sample_map, list(buffers[2]),
            backend,
        )  # fmt: skip
        results[backend] = (moe, linear)
        kept[backend] = buffers
        assert [groups.tolist() for _, groups in buffers] == [
            [0, 0, 0, -1], [0, 1, 2, 1, 1, -1, -1, -1], [0, 0, 0, -1],
        ]  # fmt: skip
    assert forms == [False] * 3 + [True] * 3
    for i, bound in enumerate((2e-2, 1e-3)):
        want = results["emulated"][i].double()
        for backend in ("triton", "triton_exact"):
            error = float((results[backend][i].double() - want).norm() / want.norm())
            assert error < bound, f"{backend} {i}: {error:.1e}"
    for backend in ("triton", "triton_exact"):
        for i, tolerance in enumerate((0, 1e-2, 0)):
            torch.testing.assert_close(
                kept[backend][i][0], kept["emulated"][i][0], rtol=tolerance, atol=tolerance
            )


def test_bad_arguments_are_named():
    x = torch.zeros((2, 64))
    lists = Preset(channels=16, columns=True).lists(64, 1, 8, "cpu")
    with pytest.raises(ValueError, match="need bfloat16 inputs, got"):
        compensated.compensate_rows(x, lists)
    lists = Preset(channels=16).lists(64, 1, 8, "cpu")
    with pytest.raises(ValueError, match="use the folded form"):
        compensated.compensate_rows(x, lists, exact=True)
    with pytest.raises(ValueError, match="block_mask must be bool"):
        compensated.compensate_rows(x[:, :32], Preset(1.0).lists(64, 1, 8, "cpu"))
    with pytest.raises(ValueError, match="channels need their hot_bits"):
        compensated.compensate_rows(x, replace(lists, hot_bits=None))
    with pytest.raises(ValueError, match=r"hot_bits must be int32 \[1, 4\], got torch.int64"):
        compensated.compensate_rows(x, replace(lists, hot_bits=lists.hot_bits.long()))
    rows, groups = new_staging(2, 1, 64, x.dtype)
    sample_map = torch.zeros(3, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"sample_map must be int32 \[2\]"):
        compensated.compensate_rows(x, lists, staging=Staging(sample_map, rows, groups))
    with pytest.raises(ValueError, match=r"staged rows must be \[places \* 1, 64\]"):
        compensated.compensate_rows(x, lists, staging=Staging(sample_map[:2], rows, groups[:1]))
    state = new_states()[0].statistics
    with pytest.raises(ValueError, match=r"rows must be \[R, 160\]"):
        count_staged_triton([StagedInput(state, lists, rows, groups)], 2)
    with pytest.raises(ValueError, match=r"groups must be int32 \[2\]"):
        rows = torch.zeros((2, 160))
        count_staged_triton([StagedInput(state, lists, rows, groups.long())], 2)
