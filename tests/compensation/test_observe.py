"""``observe`` and ``stage``: the rows of the layers, quantized and counted as they are served."""

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
    Staging,
    fused_moe_compensated,
    linear_compensated,
)
from quads_common.compensation.observe import observe
from quads_common.compensation.staging import StagedInput, count_staged, new_staging, stage
from quads_common.compensation.statistics import new_statistics
from tests.common.bits import assert_same_bits
from tests.common.moe_layer import routing
from tests.common.samples import normal
from tests.compensation.cases import compensation, with_outliers

K = 64
NOTHING = InputCompensation()


def places(tokens: int, *sampled: int) -> torch.Tensor:
    """The map of a forward in which these tokens have the places 0, 1, .."""
    sample_map = torch.full((tokens,), -1, dtype=torch.int32)
    sample_map[list(sampled)] = torch.arange(len(sampled), dtype=torch.int32)
    return sample_map


def assert_same(got, want) -> None:
    for name, tensor in want.buffers().items():
        assert_same_bits(getattr(got, name), tensor, name)


def test_observe_counts_what_is_served():
    hot = [5, 40]
    x = with_outliers(100, K, hot)
    stats = new_statistics(1, K, channel_energy=True)
    lists = compensation(K, [0, 2], hot, 4)
    observe(stats, x, lists)
    values = x.double().numpy()
    np.testing.assert_allclose(stats.mean[0], values.mean(axis=0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(stats.variance[0], values.var(axis=0), rtol=1e-12)
    plain = new_statistics(1, K)
    observe(plain, x, NOTHING)
    assert_same_bits(stats.plain_energy, plain.plain_energy, "before compensation")
    np.testing.assert_allclose(
        stats.channel_energy.unflatten(1, (-1, 16)).sum(dim=2), stats.plain_energy, rtol=1e-12
    )
    assert stats.served_energy.sum() < 0.5 * plain.served_energy.sum()
    assert stats.left_energy.sum() < 0.05 * stats.served_energy.sum()
    assert_same_bits(plain.served_energy, plain.plain_energy, "nothing is spliced")


def test_rows_without_a_list_count_nowhere():
    x = with_outliers(8, K, [5])
    poisoned = x.clone()
    poisoned[5:] = 1e4
    poisoned[6, 3] = float("nan")
    clean, padded = new_statistics(1, K), new_statistics(1, K)
    observe(clean, x[:5], NOTHING)
    observe(padded, poisoned, NOTHING, torch.tensor([0] * 5 + [-1] * 3))
    assert_same(padded, clean)


def test_a_bad_row_is_left_out():
    x = with_outliers(4, K, [5])
    x[1, 9] = float("nan")
    stats = new_statistics(1, K)
    observe(stats, x, NOTHING)
    assert stats.count.item() == 3
    assert all(t.double().isfinite().all() for t in stats.buffers().values())


def test_each_expert_is_observed_with_its_own_channels():
    lists = InputCompensation(channels=torch.tensor([[3, -1], [5, 40]], dtype=torch.int32))
    x, ids = with_outliers(30, K, [3, 5, 40]), torch.arange(30) % 2
    both = new_statistics(2, K)
    observe(both, x, lists, ids)
    for expert in range(2):
        alone = new_statistics(1, K)
        mine = InputCompensation(channels=lists.channels[expert : expert + 1])
        observe(alone, x[expert::2], mine)
        np.testing.assert_allclose(
            both.served_energy[expert], alone.served_energy[0], rtol=1e-12, err_msg=f"{expert=}"
        )


def test_linear_keeps_its_sampled_rows():
    weight = quantize(normal(16, K, seed=1))
    x = normal(60, K)
    stats, want = new_statistics(1, K), new_statistics(1, K)
    lists = compensation(K, [1])
    sampled = [3, 17, 18, 59]
    rows, groups = new_staging(6, 1, K, x.dtype)
    rows.fill_(torch.nan)
    staging = Staging(places(60, *sampled), rows, groups)
    got = linear_compensated(x, weight, compensation=lists, staging=staging)
    assert_same_bits(got, linear_compensated(x, weight, compensation=lists), "result")
    assert_same_bits(rows[:4], x[sampled], "rows")
    assert groups.tolist() == [0] * 4 + [-1] * 2
    for _ in range(2):  # the second time nothing waits
        count_staged([StagedInput(stats, lists, rows, groups)], 30)
    observe(want, x[sampled], lists)
    want.offered.add_(60)
    assert_same(stats, want)
    linear_compensated(x, weight, compensation=lists, staging=Staging(places(60), rows, groups))
    assert groups.eq(-1).all(), "no token was sampled"


def test_moe_keeps_each_experts_input():
    """w2's statistics are those of each expert's rows, recomputed expert by expert."""
    experts, inner, top_k = 4, 32, 2
    w13 = quantize(normal(experts, inner, K, seed=1))
    w2 = quantize(normal(experts, K, inner, seed=2))
    x, (weights, ids) = normal(40, K), routing(40, top_k, experts)
    ids[3, 1] = -1
    sampled = list(range(0, 40, 3))
    seen: dict[int, torch.Tensor] = {}

    class Spy(Activation):
        """Keeps GEMM2's input of each expert, in the order in which experts are computed."""

        def __call__(self, y):
            seen[len(seen)] = super().__call__(y)
            return seen[len(seen) - 1]

    sample_map = places(40, *sampled)
    both = [new_staging(20, k, width, x.dtype) for k, width in ((1, K), (top_k, inner))]
    fused_moe_compensated(
        x, w13, w2, weights, ids, activation=Spy("relu2_no_mul"), w13_input=NOTHING,
        w2_input=NOTHING, gathering=Gathering(*(Staging(sample_map, *b) for b in both)),
    )  # fmt: skip
    one, two = new_statistics(1, K), new_statistics(experts, inner)
    inputs = [StagedInput(s, NOTHING, *b) for s, b in zip((one, two), both, strict=True)]
    count_staged(inputs, 40)
    np.testing.assert_allclose(one.mean[0], x[sampled].double().mean(dim=0), rtol=1e-12)
    assert one.count.item() == len(sampled)
    for expert in range(experts):
        token, _ = torch.where(ids == expert)
        keep = torch.tensor([t in sampled for t in token.tolist()])
        values = seen[expert][keep].double()
        assert two.count[expert].item() == len(values) > 0
        np.testing.assert_allclose(two.mean[expert], values.mean(dim=0), rtol=1e-9, atol=1e-12)
        variance = values.var(dim=0, correction=0)
        np.testing.assert_allclose(two.variance[expert], variance, rtol=1e-9, atol=1e-12)


def test_rows_wait_over_several_forwards():
    """In the places that the map gives; experts of other ranks are not kept."""
    rows, groups = new_staging(3, 2, K, torch.bfloat16)
    x = normal(5, 2, K, seed=3)
    ids = torch.tensor([[0, 1], [2, -1], [1, 0], [-1, -1], [2, 1]])
    sample_map = torch.tensor([-1, 2, -1, -1, -1], dtype=torch.int32)
    stage(Staging(sample_map, rows, groups), x, ids)
    assert groups.tolist() == [-1, -1, -1, -1, 2, -1]
    sample_map = torch.tensor([-1, -1, -1, 0, 1], dtype=torch.int32)
    stage(Staging(sample_map, rows, groups), x, ids)
    assert groups.tolist() == [-1, -1, 2, 1, 2, -1]
    assert_same_bits(rows[2:5], torch.cat([x[4], x[1, :1]]), "rows")
    stage(Staging(sample_map[:0], rows, groups), x[:0], ids[:0])
    assert groups.tolist() == [-1, -1, 2, 1, 2, -1]


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


def test_stage_copies_no_constant_from_the_host():
    """Such a copy is not allowed while a CUDA graph is captured."""
    staging = Staging(places(8, 3), *new_staging(4, 1, K, torch.bfloat16))
    x = normal(8, K)
    with Operators() as found:
        stage(staging, x)
    assert "aten.argmax.default" in found.names
    assert "aten.lift_fresh.default" not in found.names


@pytest.mark.parametrize("top_k", [1, 2])
def test_nothing_has_a_data_dependent_shape(top_k):
    """Traces with fake tensors, which hold no data: a host read would raise."""
    with FakeTensorMode():
        stats = new_statistics(3, K, channel_energy=True)
        lists = InputCompensation(
            torch.ones(3, K // 16, dtype=torch.bool), torch.zeros(3, 16, dtype=torch.int32)
        )
        ids = torch.zeros(70, 2, dtype=torch.int64) if top_k > 1 else None
        x = torch.zeros(70, 2, K, dtype=torch.bfloat16)
        rows, groups = new_staging(5, top_k, K, x.dtype)
        staging = Staging(torch.zeros(70, dtype=torch.int32), rows, groups)
        stage(staging, x if top_k > 1 else x[:, 0], ids)
        count_staged([StagedInput(stats, lists, rows, groups)], 70)
