"""From rows to lists: averages, minimum of tokens, planted channels, metrics, many sites."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quads_common import quantize
from quads_common.compensation import Site, linear_compensated, new_site_state, refresh
from quads_common.compensation.refresh import refresh_is_due
from quads_common.compensation.state import SiteState, forget_served
from quads_common.compensation.statistics import reset
from tests.common.bits import assert_same_bits
from tests.common.samples import normal
from tests.compensation.serving import EXPERTS, PLANTED, W2, W13, K, feed, options, rows_with


@pytest.mark.parametrize("rate", [1.0, 1 / 16])
def test_planted_hot_channels_are_found(rate):
    """After N tokens in odd batches, the planted channels exactly."""
    chosen = options(sampling_rate=rate, min_tokens=64)
    state = new_site_state(W13, chosen)
    sizes = [7, 64, 1, 33] * 12
    for i, size in enumerate(sizes):
        feed(state, rows_with(PLANTED, size, i), chosen)
    refresh([state], chosen)
    assert state.averages.ready.all()
    assert state.selection.channels[0].tolist() == PLANTED
    assert abs(state.averages.tokens.item() - rate * sum(sizes)) <= 1


def test_each_expert_finds_its_own():
    chosen = options(splice_count_w2=16)
    state = new_site_state(W2, chosen)
    planted = [sorted(torch.randperm(K)[:16].tolist()) for _ in range(EXPERTS)]
    for expert, hot in enumerate(planted):
        feed(state, rows_with(hot, 50, expert), chosen, expert)
    refresh([state], chosen)
    assert state.selection.channels.tolist() == planted


@pytest.mark.parametrize("statistic", ["variance", "second_moment", "residual"])
def test_splice_statistic(statistic):
    """A large constant channel has no variance; a victim beside an outlier has much residual."""
    chosen = options(splice_statistic=statistic, splice_count_w13=16)
    state = new_site_state(W13, chosen)
    x = normal(64, K, dtype=torch.float32) * 0.1
    x[:, 20] = 50.0  # constant
    x[:, 64] *= 400  # outlier
    feed(state, x.to(torch.bfloat16), chosen)
    refresh([state], chosen)
    found = set(state.selection.channels[0].tolist())
    assert 64 in found
    if statistic != "residual":
        assert (20 in found) == (statistic == "second_moment")
    neighbours = set(range(64, 80)) | set(range(16, 32))
    assert (len(found & neighbours) > 14) == (statistic == "residual")


@pytest.mark.parametrize("statistic", ["residual", "variance", "second_moment"])
def test_rac_statistic_ranks_blocks(statistic):
    chosen = options(rac_statistic=statistic, splice_count_w13=0, rac_ratio=0.25)
    state = new_site_state(W13, chosen)
    x = rows_with([3, 70], 64, 0).float()
    x[:, 32:48] += 100  # no variance, a large second moment and residual
    feed(state, x.to(torch.bfloat16), chosen)
    values = x.to(torch.bfloat16).double().numpy()
    stats = state.statistics
    channel = {"variance": values.var(axis=0), "second_moment": np.square(values).mean(axis=0)}
    score = stats.served_energy[0].numpy() / 64
    if statistic != "residual":
        score = channel[statistic].reshape(-1, 16).sum(axis=1)
    want = sorted(np.argsort(-score, kind="stable")[:2].tolist())
    refresh([state], chosen)
    assert state.selection.blocks[0, :2].tolist() == want
    assert (2 in want) == (statistic != "variance")


def test_too_few_tokens_mean_every_block_and_no_channel():
    chosen = options(min_tokens=50)
    layer, experts = new_site_state(W13, chosen), new_site_state(W2, chosen)
    feed(layer, rows_with(PLANTED, 49, 0), chosen)
    for expert, rows in enumerate((50, 49, 0)):
        feed(experts, rows_with(PLANTED, rows, expert), chosen, expert)
    refresh([layer, experts], chosen)
    assert layer.selection.block_mask.all() and layer.selection.channels.eq(-1).all()
    assert layer.statistics.count.item() == 49, "it keeps collecting"
    assert experts.averages.ready.tolist() == [True, False, False]
    assert experts.selection.block_mask.sum(dim=1).tolist() == [4, 8, 8]
    assert experts.selection.channels.ge(0).sum(dim=1).tolist() == [16, 0, 0]
    feed(layer, rows_with(PLANTED, 1, 9), chosen)
    feed(experts, rows_with(PLANTED, 1, 9), chosen, 1)
    refresh([layer, experts], chosen)
    assert layer.selection.channels[0].tolist() == PLANTED
    assert layer.statistics.count.item() == 0
    assert experts.averages.ready.tolist() == [True, True, False]


def test_average_over_refreshes():
    """average = .9 * average + .1 * score, the first score as it is; sums start anew each time."""
    chosen = options(splice_count_w13=0)
    state = new_site_state(W13, chosen)
    scores = []
    for i in range(4):
        x = normal(32, K, seed=i) * (i + 1)
        fresh = new_site_state(W13, chosen)
        feed(fresh, x, chosen)
        scores.append(fresh.statistics.served_energy / 32)
        feed(state, x, chosen)
        refresh([state], chosen)
    want = scores[0]
    for score in scores[1:]:
        want = 0.9 * want + 0.1 * score
    torch.testing.assert_close(state.averages.block, want, rtol=1e-12, atol=0)
    assert state.averages.refreshes.item() == 4 and state.averages.tokens.item() == 128


def test_a_list_with_few_rows_is_not_averaged_yet():
    chosen = options(min_tokens=20)
    state = new_site_state(W2, chosen)
    for expert in range(EXPERTS):
        feed(state, rows_with(PLANTED, 30, expert), chosen, expert)
    refresh([state], chosen)
    before = state.averages.block.clone()
    feed(state, rows_with([5], 19, 7), chosen, 0)
    feed(state, rows_with([5], 20, 8), chosen, 1)
    refresh([state], chosen)
    assert_same_bits(state.averages.block[0], before[0], "19 rows wait")
    assert not torch.equal(state.averages.block[1], before[1])
    assert state.statistics.count.tolist() == [19, 0, 0]


def test_blocks_whose_hot_channels_changed_begin_a_new_average():
    """The victims' energy from before the splice must not linger for ten refreshes."""
    chosen = options(splice_count_w13=16)
    state = new_site_state(W13, chosen)
    feed(state, rows_with(PLANTED, 64, 0), chosen)
    refresh([state], chosen)
    assert not state.averages.block_known.any(), "every block has a planted channel"
    loud = state.averages.block.clone()
    feed(state, rows_with(PLANTED, 64, 1), chosen)
    served = state.statistics.served_energy / 64
    refresh([state], chosen)
    assert_same_bits(state.averages.block, served, "the score as it is")
    assert (served < 0.2 * loud).all() and state.averages.block_known.all()


@pytest.mark.parametrize("statistic", ["residual", "variance", "second_moment"])
def test_splice_then_rac_ranks_what_the_splice_leaves(statistic):
    """The hot block loses its rank once its hot channels are gone."""
    hot = list(range(16, 32))
    chosen = options(rac_ratio=0.125, rac_statistic=statistic)
    state = new_site_state(W13, chosen)
    x = rows_with(hot, 128, 0)
    x[:, 96:112] *= 3
    for _ in range(2):
        feed(state, x, chosen)
        refresh([state], chosen)
    assert state.selection.channels[0].tolist() == hot
    assert state.selection.blocks[0, 0].item() == 6


def per_row(state: SiteState) -> torch.Tensor:
    """[G, K/16] served energy of a row."""
    covered = state.statistics.count - state.averages.uncovered
    return state.statistics.served_energy / covered.unsqueeze(1)


def test_a_hot_list_that_is_dropped_mixes_no_energies():
    """Too few rows after ``forget``: the rows counted under the old channels do not rank blocks."""
    chosen = options(min_tokens=150, rac_ratio=0.25)
    state, alone = new_site_state(W13, chosen), new_site_state(W13, chosen)
    feed(state, rows_with(PLANTED, 200, 0), chosen)
    refresh([state], chosen)
    reset(state.statistics)
    for buffer in state.averages.buffers().values():
        buffer.zero_()
    feed(state, rows_with(PLANTED, 100, 1), chosen)
    (found,) = refresh([state], chosen)
    assert found.residual_energy_after > 0, "of the rows under the lists until now"
    assert state.selection.channels.eq(-1).all() and state.statistics.count.item() == 100
    assert not state.statistics.served_energy.any() and not state.statistics.underflows.any()
    rows = rows_with(PLANTED, 100, 2)
    feed(state, rows, chosen)
    feed(alone, rows, chosen)
    assert_same_bits(per_row(state), per_row(alone), "only the rows under the new lists")
    refresh([state], chosen)
    assert not state.averages.ready.any(), "100 rows of 200 count for ranking blocks"
    feed(state, rows_with(PLANTED, 50, 3), chosen)
    feed(alone, rows_with(PLANTED, 50, 3), chosen)
    expected = per_row(alone)
    refresh([state], chosen)
    assert_same_bits(state.averages.block, expected, "150 rows")
    assert state.averages.ready.all() and state.averages.uncovered.item() == 0


@pytest.mark.parametrize("changes", [{"rac_ratio": 0.0}, {"rac_statistic": "variance"}])
def test_where_served_energies_rank_nothing_all_rows_count(changes):
    chosen = options(min_tokens=20, **changes)
    state = new_site_state(W13, chosen)
    feed(state, rows_with(PLANTED, 15, 0), chosen)
    forget_served(state, torch.ones(1, dtype=torch.bool))
    (found,) = refresh([state], chosen)
    assert np.isnan(found.residual_energy_after) and found.residual_energy_before > 0
    feed(state, rows_with(PLANTED, 5, 1), chosen)
    assert refresh([state], chosen)[0].groups_ready == 1
    assert state.averages.uncovered.item() == 0


def test_only_lists_that_change_forget():
    chosen = options()
    state = new_site_state(W2, chosen)
    for expert in range(EXPERTS):
        feed(state, rows_with(PLANTED, 5, expert), chosen, expert)
    forget_served(state, torch.tensor([True, False, False]))
    assert state.averages.uncovered.tolist() == [5, 0, 0]
    assert state.statistics.served_energy.bool().any(dim=1).tolist() == [False, True, True]
    assert state.statistics.plain_energy.all()


def test_refresh_is_deterministic_and_in_place():
    chosen = options()
    states = [new_site_state(W13, chosen), new_site_state(W13, chosen)]
    addresses = {name: t.data_ptr() for name, t in states[0].buffers().items()}
    for state in states:
        for i in range(3):
            feed(state, rows_with(PLANTED[:4], 20, i), chosen)
            refresh([state], chosen)
    for name, tensor in states[0].buffers().items():
        assert_same_bits(tensor, states[1].buffers()[name], name)
    assert {name: t.data_ptr() for name, t in states[0].buffers().items()} == addresses


@pytest.mark.parametrize("adaptive", [False, True])
def test_sites_refreshed_together_are_as_if_alone(adaptive, monkeypatch):
    """Several of each shape; with ``adaptive`` their counts differ."""
    chosen = options(min_tokens=20, adaptive=adaptive, rac_ratio=0.5)
    other = Site("layers.9.w13", "w13", 2 * K, 2 * K)
    sites = [W13, W2, replace(W13, name="a.w13"), other, replace(W2, name="a.w2")]
    many = [new_site_state(site, chosen) for site in sites]
    few = [new_site_state(site, chosen) for site in sites]
    for step in range(3):
        for i, pair in enumerate(zip(many, few, strict=True)):
            x = normal(30 + 20 * i, pair[0].site.width, seed=10 * step + i)
            group = torch.arange(len(x)) % len(pair[0].site.groups)
            for state in pair:
                for expert in state.site.groups:
                    feed(state, x[group == expert], chosen, expert)
        found = refresh(many, chosen)
        monkeypatch.setattr("quads_common.compensation.state.MOST_TOGETHER", 1)
        expected = refresh(few, chosen)
        monkeypatch.undo()
        assert found == expected and [m.name for m in found] == [s.name for s in sites]
        for one, two in zip(many, few, strict=True):
            for name, tensor in one.buffers().items():
                assert_same_bits(tensor, two.buffers()[name], f"{one.site.name} {name}")


class _Counter(TorchDispatchMode):
    """Counts operations, and those that wait for the device."""

    def __init__(self):
        super().__init__()
        self.calls = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        self.waits += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_the_work_of_the_host_does_not_grow_with_the_sites():
    chosen = options(min_tokens=1)
    found = []
    for count in (2, 20):
        states = [new_site_state(replace(W13, name=f"{i}.w13"), chosen) for i in range(count)]
        for state in states:
            feed(state, rows_with(PLANTED, 30, 0), chosen)
        with _Counter() as counter:
            refresh(states, chosen)
        found.append((counter.calls, counter.waits))
    assert found[0] == found[1] and found[0][1] <= 1, found


def test_the_served_selection_is_the_refreshed_one():
    """A layer built once sees the new lists through the same tensors."""
    chosen = options(splice_count_w13=0, rac_ratio=0.25)
    state = new_site_state(W13, chosen)
    lists = state.selection.compensation(chosen, "w13")
    weight, x = quantize(normal(8, K, seed=1)), rows_with([3], 32, 0)
    before = linear_compensated(x, weight, compensation=lists)
    feed(state, x, chosen)
    refresh([state], chosen)
    after = linear_compensated(x, weight, compensation=lists)
    assert not torch.equal(before, after)
    fresh = state.selection.compensation(chosen, "w13")
    assert_same_bits(after, linear_compensated(x, weight, compensation=fresh), "lists in place")


def test_refresh_interval():
    chosen = options(refresh_interval=3)
    assert [b for b in range(1, 10) if refresh_is_due(b, chosen)] == [3, 6, 9]
