"""``statistics`` against a float64 recomputation over all rows at once."""

import itertools

import numpy as np
import pytest
import torch

from quads_common.compensation.statistics import (
    ChannelStatistics,
    RowEnergies,
    copy_into,
    new_statistics,
    reset,
    update,
)
from tests.common.bits import assert_same_bits
from tests.common.samples import normal

K, BLOCKS, GROUPS = 48, 3, 4
ENERGIES = ("plain_energy", "served_energy", "left_energy", "underflows")
TOLERANCE = 1e-9  # the requirement is 1e-5; float64 sums leave this much room


def energies_of(x: torch.Tensor) -> RowEnergies:
    """Any four functions of the rows will do here."""
    squares = torch.nan_to_num(x.double()).square()
    blocks = squares.unflatten(1, (BLOCKS, 16)).sum(dim=2)
    return RowEnergies(blocks, blocks / 2, blocks / 8, blocks > 20, squares)


def recomputed(x: torch.Tensor, keep: np.ndarray) -> dict[str, np.ndarray]:
    """One group's statistics over the kept rows, in numpy, two passes."""
    values = x.double().numpy()[keep]
    if len(values) == 0:
        return {}
    blocks = np.square(values).reshape(len(values), BLOCKS, 16).sum(axis=2)
    mean = values.mean(axis=0)
    return {
        "count": np.array(len(values)),
        "mean": mean,
        "m2": np.square(values - mean).sum(axis=0),
        "plain_energy": blocks.sum(axis=0),
        "served_energy": blocks.sum(axis=0) / 2,
        "left_energy": blocks.sum(axis=0) / 8,
        "underflows": (blocks > 20).sum(axis=0),
        "channel_energy": np.square(values).sum(axis=0),
    }


def check(stats: ChannelStatistics, x, keep, group=None, rtol: float = TOLERANCE) -> None:
    group = np.zeros(len(x), int) if group is None else group.numpy()
    for g in range(len(stats.count)):
        want = recomputed(x, keep & (group == g))
        for name in ("count", "mean", "m2", *ENERGIES, "channel_energy"):
            got = getattr(stats, name)[g].numpy()
            expected = want.get(name, np.zeros_like(got))
            np.testing.assert_allclose(got, expected, rtol=rtol, atol=1e-12, err_msg=f"{name} {g}")


def fed(x, mask=None, group=None, groups=1, sizes=(7, 1, 64, 3)) -> ChannelStatistics:
    """Statistics of all rows, in batches of the given sizes."""
    stats = new_statistics(groups, K, channel_energy=True)
    start = 0
    for size in itertools.cycle(sizes):
        rows = slice(start, min(start + size, len(x)))
        update(
            stats,
            x[rows],
            energies_of(x[rows]),
            None if mask is None else mask[rows],
            None if group is None else group[rows],
        )
        start += size
        if start >= len(x):
            return stats


@pytest.mark.parametrize("sizes", [(300,), (1,), (7, 1, 64, 3), (0, 150)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_split_into_batches(sizes, dtype):
    x = (normal(300, K, dtype=torch.float32) * 3 + 1).to(dtype)
    check(fed(x, sizes=sizes), x, np.ones(300, bool))


def test_groups_masks_and_bad_rows():
    x = normal(400, K, dtype=torch.float32)
    x[5, 3], x[77, 0], x[200] = float("nan"), float("inf"), float("-inf")
    mask = torch.rand(400) < 0.7
    x[~mask] = 1e4  # poison what must not count
    x[torch.arange(400)[~mask][::2]] = float("nan")
    group = torch.randint(-1, GROUPS + 1, (400,))  # -1 and GROUPS count nowhere
    group[group == 2] = 0  # a group without rows
    keep = mask.numpy() & torch.isfinite(x).all(dim=1).numpy()
    stats = fed(x, mask, group, GROUPS)
    check(stats, x, keep, group)
    assert stats.count[2] == 0 and stats.variance[2].eq(0).all()
    for name, tensor in stats.buffers().items():
        assert tensor.double().isfinite().all(), name


@pytest.mark.parametrize(
    ("mean", "deviation"), [(1e6, 1e-1), (-3e4, 1e-2), (1e15, 1e3)], ids=["1e6", "-3e4", "1e15"]
)
def test_small_variance_about_a_large_mean(mean, deviation):
    """E[x^2] - E[x]^2 loses everything here. float32 inputs: the reference has the same ones."""
    exact = mean + deviation * torch.randn(2000, K, dtype=torch.float64)
    x = exact.to(torch.float32)
    stats = fed(x, sizes=(11, 400, 1))
    values = x.double().numpy()
    np.testing.assert_allclose(stats.variance[0].numpy(), values.var(axis=0), rtol=1e-5)
    naive = (x.square().mean(dim=0) - x.mean(dim=0).square()).double().numpy()
    assert not np.allclose(naive, values.var(axis=0), rtol=1e-2), "the naive formula would do"


def test_the_mean_does_not_stagnate_after_many_rows():
    """One row of weight 1e-8 still moves a mean of 1000."""
    stats = new_statistics(1, 16)
    stats.count.fill_(1e8)
    stats.mean.fill_(1000.0)
    x = torch.full((1, 16), 1001.0)
    update(stats, x, RowEnergies(*[torch.zeros(1, 1)] * 4))
    assert float(stats.mean[0, 0] - 1000.0) == pytest.approx(1e-8, rel=1e-4)


def test_update_is_deterministic():
    x = normal(64, K, dtype=torch.float32)
    group = torch.randint(0, GROUPS, (64,))
    a, b = fed(x, None, group, GROUPS), fed(x, None, group, GROUPS)
    for name, tensor in a.buffers().items():
        assert_same_bits(tensor, getattr(b, name), name)


def test_reset_of_some_groups():
    x = normal(64, K, dtype=torch.float32)
    group = torch.arange(64) % GROUPS
    stats = fed(x, None, group, GROUPS)
    reset(stats, torch.tensor([True, False, True, False]))
    check(stats, x, (group % 2 == 1).numpy(), group)
    reset(stats)
    check(stats, x, np.zeros(64, bool), group)


def test_channel_energies_are_optional():
    stats = new_statistics(1, K)
    x = normal(8, K, dtype=torch.float32)
    e = energies_of(x)
    update(stats, x, RowEnergies(e.plain, e.served, e.left, e.underflows))
    assert stats.channel_energy.shape == (1, 0) and stats.count.item() == 8


def test_update_changes_buffers_in_place():
    stats = new_statistics(1, K, channel_energy=True)
    addresses = {name: t.data_ptr() for name, t in stats.buffers().items()}
    x = normal(8, K, dtype=torch.float32)
    update(stats, x, energies_of(x))
    reset(stats, torch.tensor([False]))
    assert {name: t.data_ptr() for name, t in stats.buffers().items()} == addresses
    assert stats.count.item() == 8


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_update_compiles_to_one_graph(backend):
    """No host synchronization and no data-dependent shape; in-place writes are kept."""
    x = normal(16, K, dtype=torch.float32)
    group = torch.randint(-1, GROUPS, (16,))
    mask = torch.rand(16) < 0.5
    eager, compiled = (new_statistics(GROUPS, K, channel_energy=True) for _ in range(2))
    run = torch.compile(update, fullgraph=True, backend=backend)
    for _ in range(2):
        update(eager, x, energies_of(x), mask, group)
        run(compiled, x, energies_of(x), mask, group)
    for name, tensor in eager.buffers().items():
        torch.testing.assert_close(getattr(compiled, name), tensor, rtol=1e-12, atol=0)


def test_copy_into_refuses_what_does_not_fit():
    stats = new_statistics(1, K)
    good = {name: t.clone() + 1 for name, t in new_statistics(1, K).buffers().items()}
    copy_into(stats.buffers(), good, "all")
    assert stats.count.item() == 1
    with pytest.raises(ValueError, match=r"w13: .*expected"):
        copy_into(stats.buffers(), {"count": good["count"]}, "w13")
    with pytest.raises(ValueError, match=r"w13: mean has shape \[1, 32\], expected \[1, 48\]"):
        copy_into(stats.buffers(), {**good, "mean": torch.zeros(1, 32)}, "w13")
