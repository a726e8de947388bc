"""Compensation kernels in Triton's interpreter, at small odd sizes, against torch and float64."""

import pytest
import torch

from quads_common.compensation import CompensationOptions, Site, new_site_state
from quads_common.compensation.ops import quads_linear_compensated, quads_moe_compensated
from quads_common.kernels import compensated
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
    "quads_splice", {"sampling_rate": 0.5, "splice_count_w13": 16, "splice_count_w2": 16}
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.__name__)
def test_kernels_equal_torch(group):
    checks = list(group("cpu", SHAPES, True))
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
        state.statistics.enabled.fill_(True)
        state.selection.channels[:, :3] = torch.tensor([1, 17, 40 + i])
        state.selection.block_mask[:, 1] = False
    return states


def test_ops_run_the_form_they_name(monkeypatch):
    """And count the rows, whichever it is."""
    generator = torch.Generator().manual_seed(0)
    w13 = random_weight(4, 96, 160, generator=generator, exact=True)
    w2 = random_weight(4, 160, 48, generator=generator, exact=True)
    x = random_rows(6, 160, generator=generator)
    ids = torch.tensor([[0, 3], [1, -1], [3, 2], [0, 1], [2, 1], [0, 2]], dtype=torch.int32)
    router = torch.rand((6, 2), generator=generator)
    weights = (w13.packed, w13.block_scale, w13.global_scale)
    weights += (w2.packed, w2.block_scale, w2.global_scale)
    mask = torch.tensor([True, True, False, True, True, True])
    forms, plain = [], compensated.compensate_rows
    monkeypatch.setattr(
        compensated,
        "compensate_rows",
        lambda *a, **k: forms.append(k["exact"]) or plain(*a, **k),
    )
    results = {}
    for backend in ("emulated", "triton", "triton_exact"):
        states = new_states()
        lists = [s.selection for s in states]
        buffers = [t for s in states[:2] for t in s.statistics.buffers().values()]
        moe = quads_moe_compensated(
            x, *weights, router, ids, None, "silu", None, False, lists[0].block_mask,
            lists[0].channels, None, lists[1].block_mask, lists[1].channels, None, 1.0, buffers, 2,
            mask, backend,
        )  # fmt: skip
        linear = quads_linear_compensated(
            x, *(t[0] for t in weights[:3]), None, lists[2].block_mask, lists[2].channels, None,
            1.0, list(states[2].statistics.buffers().values()), 2, mask, backend,
        )  # fmt: skip
        results[backend] = (moe, linear)
        assert [int(s.statistics.offered) for s in states] == [5, 5, 5]
        assert min(float(s.statistics.count.sum()) for s in states) >= 2
    assert forms == [False] * 3 + [True] * 3
    for i, bound in enumerate((2e-2, 1e-3)):
        want = results["emulated"][i].double()
        for backend in ("triton", "triton_exact"):
            error = float((results[backend][i].double() - want).norm() / want.norm())
            assert error < bound, f"{backend} {i}: {error:.1e}"


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
    state = new_states()[0].statistics
    with pytest.raises(ValueError, match=r"x must be \[2, 160\]"):
        compensated.observe_triton(state, x, lists, 2)
    with pytest.raises(ValueError, match=r"row_mask must be bool \[2\]"):
        compensated.observe_triton(
            state, torch.zeros((2, 160)), lists, 2, row_mask=torch.ones(3, dtype=torch.bool)
        )
