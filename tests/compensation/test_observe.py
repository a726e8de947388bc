"""Sampling and ``observe``: which rows count, and that the layers count what they compute with."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from quads_common import quantize
from quads_common.activation import Activation
from quads_common.compensation import (
    Gathering,
    InputCompensation,
    fused_moe_compensated,
    linear_compensated,
)
from quads_common.compensation.observe import observe
from quads_common.compensation.sampling import sampled_rows
from quads_common.compensation.statistics import new_statistics
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import routing
from tests.common.samples import normal
from tests.compensation.cases import compensation, with_outliers

K = 64
NOTHING = InputCompensation()


def enabled(groups: int = 1, width: int = K, **options):
    stats = new_statistics(groups, width, **options)
    stats.enabled.fill_(True)
    return stats


def sampled_ordinals(masks: list[torch.Tensor], period: int) -> list[int]:
    """Ordinals among real rows that are sampled when the rows come in these forwards."""
    offered, found, seen = torch.zeros(1, dtype=torch.int64), [], 0
    for mask in masks:
        rows, used = sampled_rows(offered, mask, period)
        ordinals = seen + mask.long().cumsum(0) - 1
        assert mask[rows[used]].all(), "a row that is not real"
        found += ordinals[rows[used]].tolist()
        seen += int(mask.sum())
    assert offered.item() == seen
    return found


@pytest.mark.parametrize("period", [1, 2, 7, 64, 1000])
def test_one_row_of_each_window(period):
    found = sampled_ordinals([torch.ones(period * 20, dtype=torch.bool)], period)
    assert [ordinal // period for ordinal in found] == list(range(20))


@pytest.mark.parametrize("period", [1, 3, 64])
def test_sampling_does_not_depend_on_the_batches(period):
    generator = np.random.default_rng(0)
    whole = sampled_ordinals([torch.ones(4000, dtype=torch.bool)], period)
    masks, total = [], 0
    while total < 4000:
        mask = torch.from_numpy(generator.random(generator.integers(1, 300)) < 0.6)
        keep = mask & (mask.long().cumsum(0) <= 4000 - total)
        masks.append(keep)
        total += int(keep.sum())
    assert sampled_ordinals(masks, period) == whole
    one_by_one = [torch.ones(1, dtype=torch.bool)] * 300
    assert sampled_ordinals(one_by_one, period) == [o for o in whole if o < 300]


@pytest.mark.parametrize("batch", [8, 32, 61, 64, 128])
def test_every_place_in_the_batch_is_sampled(batch):
    """Decoding with a fixed batch: no sequence is favoured by its place."""
    found = sampled_ordinals([torch.ones(batch, dtype=torch.bool)] * (64 * 1024 // batch), 64)
    hits = np.bincount(np.array(found) % batch, minlength=batch)
    expected = len(found) / batch
    assert abs(hits - expected).max() < 6 * expected**0.5, hits


def test_sampling_shapes_depend_on_shapes_only():
    for total in (1, 2, 63, 64, 65, 66, 300):
        for offset in range(0, 64, 7):
            offered = torch.tensor([offset])
            rows, used = sampled_rows(offered, torch.ones(total, dtype=torch.bool), 64)
            assert rows.shape == used.shape == (min(total, (total + 62) // 64 + 1),)
            assert int(used.sum()) <= rows.numel() and bool(((rows >= 0) & (rows < total)).all())


def test_observe_counts_what_is_served():
    hot = [5, 40]
    x = with_outliers(100, K, hot)
    stats = enabled(channel_energy=True)
    lists = compensation(K, [0, 2], hot, 4)
    observe(stats, x, lists, 1)
    values = x.double().numpy()
    np.testing.assert_allclose(stats.mean[0], values.mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(stats.variance[0], values.var(axis=0), rtol=1e-12)
    plain = enabled()
    observe(plain, x, NOTHING, 1)
    assert_same_bits(stats.plain_energy, plain.plain_energy, "before compensation")
    np.testing.assert_allclose(
        stats.channel_energy.unflatten(1, (-1, 16)).sum(dim=2), stats.plain_energy, rtol=1e-12
    )
    assert stats.served_energy.sum() < 0.5 * plain.served_energy.sum()
    assert stats.left_energy.sum() < 0.05 * stats.served_energy.sum()
    assert_same_bits(plain.served_energy, plain.plain_energy, "nothing is spliced")


def test_padding_and_warm_up_count_nowhere():
    x = with_outliers(8, K, [5])
    mask = torch.tensor([True] * 5 + [False] * 3)
    poisoned = x.clone()
    poisoned[5:] = 1e4
    poisoned[6, 3] = float("nan")
    clean, padded, off = enabled(), enabled(), new_statistics(1, K)
    observe(clean, x[:5], NOTHING, 2)
    observe(padded, poisoned, NOTHING, 2, row_mask=mask)
    for name, tensor in clean.buffers().items():
        assert_same_bits(getattr(padded, name), tensor, name)
    observe(off, x, NOTHING, 1)
    assert off.offered.item() == 0 and off.count.item() == 0 and off.mean.eq(0).all()


def test_a_bad_row_is_left_out_but_was_offered():
    x = with_outliers(4, K, [5])
    x[1, 9] = float("nan")
    stats = enabled()
    observe(stats, x, NOTHING, 1)
    assert stats.count.item() == 3 and stats.offered.item() == 4
    assert all(t.double().isfinite().all() for t in stats.buffers().values())


def test_linear_counts_its_input():
    weight = quantize(normal(16, K, seed=1))
    x = normal(2, 30, K)
    mask = torch.rand(2, 30) < 0.5
    stats, want = enabled(), enabled()
    lists = compensation(K, [1])
    got = linear_compensated(
        x, weight, compensation=lists, statistics=stats, period=4, row_mask=mask
    )
    observe(want, x.reshape(60, K), lists, 4, row_mask=mask.reshape(60))
    for name, tensor in want.buffers().items():
        assert_same_bits(getattr(stats, name), tensor, name)
    assert_same_bits(got, linear_compensated(x, weight, compensation=lists), "result")


@pytest.mark.parametrize("period", [1, 5])
def test_moe_counts_each_experts_input(period):
    """w2's statistics are those of each expert's rows, recomputed expert by expert."""
    experts, inner = 4, 32
    w13 = quantize(normal(experts, inner, K, seed=1))
    w2 = quantize(normal(experts, K, inner, seed=2))
    x, (weights, ids) = normal(40, K), routing(40, 2, experts)
    ids[3, 1] = -1
    mask = torch.ones(40, dtype=torch.bool)
    mask[30:] = False
    seen: dict[int, torch.Tensor] = {}

    class Spy(Activation):
        """Keeps GEMM2's input of each expert, in the order in which experts are computed."""

        def __call__(self, y):
            seen[len(seen)] = super().__call__(y)
            return seen[len(seen) - 1]

    one, two = enabled(), enabled(experts, inner)
    fused_moe_compensated(
        x, w13, w2, weights, ids, activation=Spy("relu2_no_mul"), w13_input=NOTHING,
        w2_input=NOTHING, gathering=Gathering(one, two, period, mask),
    )  # fmt: skip
    rows, used = sampled_rows(torch.zeros(1, dtype=torch.int64), mask, period)
    tokens = set(rows[used].tolist())
    np.testing.assert_allclose(one.mean[0], x[rows[used]].double().mean(dim=0), rtol=1e-12)
    for expert in range(experts):
        token, _ = torch.where(ids == expert)
        keep = torch.tensor([t in tokens for t in token.tolist()])
        values = seen[expert][keep].double()
        assert two.count[expert].item() == len(values) > 0
        np.testing.assert_allclose(two.mean[expert], values.mean(dim=0), rtol=1e-9, atol=1e-12)
        variance = values.var(dim=0, correction=0)
        np.testing.assert_allclose(two.variance[expert], variance, rtol=1e-9, atol=1e-12)


def test_each_expert_is_observed_with_its_own_channels():
    lists = InputCompensation(channels=torch.tensor([[3, -1], [5, 40]], dtype=torch.int32))
    x, ids = with_outliers(30, K, [3, 5, 40]).unsqueeze(1), torch.arange(30).unsqueeze(1) % 2
    both = enabled(2)
    observe(both, x, lists, 1, expert_ids=ids)
    for expert in range(2):
        alone = enabled()
        mine = InputCompensation(channels=lists.channels[expert : expert + 1])
        observe(alone, x[expert::2, 0], mine, 1)
        np.testing.assert_allclose(
            both.served_energy[expert], alone.served_energy[0], rtol=1e-12, err_msg=f"{expert=}"
        )


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_observe_copies_no_constant_from_the_host():
    """Such a copy is not allowed while a CUDA graph is captured."""
    with Operators() as found:
        observe(enabled(), normal(8, K), NOTHING, 2)
    assert "aten.searchsorted.Tensor" in found.names
    assert "aten.lift_fresh.default" not in found.names


def test_observe_has_no_data_dependent_shape():
    """Traces with fake tensors, which hold no data: a host read would raise."""
    with FakeTensorMode():
        stats = new_statistics(3, K, channel_energy=True)
        lists = InputCompensation(
            torch.ones(3, K // 16, dtype=torch.bool), torch.zeros(3, 16, dtype=torch.int32)
        )
        ids = torch.zeros(70, 2, dtype=torch.int64)
        x = torch.zeros(70, 2, K, dtype=torch.bfloat16)
        observe(stats, x, lists, 64, row_mask=torch.ones(70, dtype=torch.bool), expert_ids=ids)
        observe(new_statistics(1, K), x[:, 0], NOTHING, 64)
