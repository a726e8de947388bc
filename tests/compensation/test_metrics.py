"""What a refresh reports, and how it shares blocks between layers."""

import dataclasses
import itertools
import math

import pytest
import torch

from quads_common import fake_quantize
from quads_common.compensation import Site, new_site_state, refresh
from quads_common.compensation.adaptive import allocate_blocks
from quads_common.compensation.metrics import refresh_summary
from quads_common.compensation.selection import checksums
from tests.common.samples import normal
from tests.compensation.cases import with_outliers
from tests.compensation.serving import (
    EXPERTS,
    PLANTED,
    W2,
    W13,
    K,
    feed,
    options,
    rows_with,
)


def test_without_new_rows_a_refresh_changes_nothing():
    chosen = options()
    state = new_site_state(W13, chosen)
    feed(state, rows_with(PLANTED, 20, 0), chosen)
    refresh([state], chosen)
    digest = checksums([state.selection])
    (found,) = refresh([state], chosen)
    assert checksums([state.selection]) == digest
    assert found.blocks_overlap == found.channels_overlap == 1
    assert math.isnan(found.residual_energy_before) and found.tokens == 20


def test_metrics():
    chosen = options(splice_count_w13=0, rac_ratio=0.25)
    state = new_site_state(W13, chosen)
    x = with_outliers(64, K, [3, 70])
    feed(state, x, chosen)
    (first,) = refresh([state], chosen)
    values = x.double()
    assert first.signal_energy == pytest.approx(float(values.square().sum()) / 64)
    plain = (values - fake_quantize(x.float(), per_token=True).double()).square().sum() / 64
    assert first.residual_energy_before == pytest.approx(float(plain), rel=1e-5)
    assert first.residual_energy_after < 0.02 * first.residual_energy_before, "every block"
    assert (first.blocks_selected, first.channels_selected) == (0.25, 0)
    assert first.blocks_overlap == 0.25 and first.tokens == 64 and first.refreshes == 1
    feed(state, x, chosen)
    kept = state.selection.block_mask[0]
    stats = state.statistics
    want = torch.where(kept, stats.left_energy, stats.served_energy).sum() / 64
    (second,) = refresh([state], chosen)
    assert second.residual_energy_after == pytest.approx(float(want))
    assert first.residual_energy_after < second.residual_energy_after
    assert second.residual_energy_after < second.residual_energy_before
    assert second.blocks_overlap == 1 and second.groups_ready == 1
    assert second.to_json()["name"] == "layers.0.w13"
    assert "1 inputs" in refresh_summary([second]) and "128 rows" in refresh_summary([second])
    assert refresh_summary([]) == "no compensated input"


def test_underflow_share_counts_lost_residuals_of_selected_blocks():
    """Blocks 1 to 7 of a row with a huge maximum lie below the residual's reach."""
    chosen = options(splice_count_w13=0, rac_ratio=1.0)
    state = new_site_state(W13, chosen)
    x = normal(32, K) * 0.25
    x[:, 3] = 1e5
    feed(state, x, chosen)
    lost = state.statistics.underflows[0] / 32
    (found,) = refresh([state], chosen)
    assert 0.5 < found.rac_scale_underflow_share == pytest.approx(float(lost.mean()))
    calm = new_site_state(W13, chosen)
    feed(calm, normal(32, K), chosen)
    assert refresh([calm], chosen)[0].rac_scale_underflow_share == 0


def test_adaptive_moves_blocks_between_layers_of_a_kind():
    chosen = options(adaptive=True, splice_count_w13=0, splice_count_w2=0)
    quiet, loud = (
        new_site_state(Site("a", "w13", K, K), chosen),
        new_site_state(Site("b", "w13", K, K), chosen),
    )
    other, waiting = new_site_state(W2, chosen), new_site_state(Site("c", "w13", K, K), chosen)
    feed(quiet, normal(32, K), chosen)
    feed(loud, normal(32, K) * 10, chosen)
    for expert in range(EXPERTS):
        feed(other, normal(32, K, seed=expert), chosen, expert)
    refresh([quiet, other, loud, waiting], chosen)
    assert quiet.selection.block_mask.sum() == 1 and loud.selection.block_mask.sum() == 7
    assert other.selection.block_mask.sum(dim=1).tolist() == [4] * 3, "a kind of its own"
    assert waiting.selection.block_mask.all(), "nothing counted: every block"


def test_adaptive_looks_at_lists_that_are_ready():
    """An expert without rows does not make its layer look quiet."""
    chosen = options(adaptive=True, splice_count_w13=0, splice_count_w2=0)
    few, all_of_them = (new_site_state(dataclasses.replace(W2, name=name), chosen) for name in "ab")
    feed(few, normal(32, K) * 1.5, chosen, 0)
    for expert in range(EXPERTS):
        feed(all_of_them, normal(32, K), chosen, expert)
    refresh([few, all_of_them], chosen)
    assert few.selection.block_mask.sum(dim=1).tolist() == [7, 8, 8]
    assert all_of_them.selection.block_mask.sum(dim=1).tolist() == [1] * 3


def test_adaptive_counts_what_a_block_costs():
    """Of two equally loud inputs the one with the narrow weight gets more; the total stays."""
    chosen = options(adaptive=True, splice_count_w13=0, splice_count_w2=0)
    names, rows = "abc", {"a": 320, "b": 64, "c": 64}
    states = [new_site_state(Site(name, "linear", K, K), chosen) for name in names]
    for state, scale in zip(states, (1.0, 1.0, 0.1), strict=True):
        feed(state, normal(32, K) * scale, chosen)
    refresh(states, chosen, rows=rows)
    blocks = {s.site.name: int(s.selection.block_mask.sum()) for s in states}
    uniform = sum(4 * n for n in rows.values())
    cost = sum(blocks[name] * rows[name] for name in names)
    assert uniform - min(rows.values()) < cost <= uniform, blocks
    assert blocks["b"] == 8 > blocks["a"], blocks


def best_by_trying(scores, counts, costs):
    """The most energy of any choice under the budget."""
    budget = sum(n * cost for n, cost in zip(counts, costs, strict=True))
    sums = [s.mean(dim=0).sort(descending=True).values.cumsum(0).tolist() for s in scores]
    choices = itertools.product(*(range(1, len(s) + 1) for s in sums))
    return max(
        sum(s[n - 1] for s, n in zip(sums, choice, strict=True))
        for choice in choices
        if sum(n * cost for n, cost in zip(choice, costs, strict=True)) <= budget
    )


@pytest.mark.parametrize("costs", [(1, 1, 1), (5, 1, 1), (7, 2, 3)], ids=str)
def test_adaptive_against_all_choices(costs):
    """Optimal at equal costs, else within the worth of one block; never above the budget."""
    generator = torch.Generator().manual_seed(sum(costs))
    counts = (3, 4, 2)
    for _ in range(5):
        scores = [torch.rand((1, n), generator=generator).double() for n in (6, 8, 4)]
        found = allocate_blocks(scores, counts, costs)
        spent = sum(n * cost for n, cost in zip(found, costs, strict=True))
        budget = sum(n * cost for n, cost in zip(counts, costs, strict=True))
        assert spent <= budget and min(found) >= 1
        sums = [s[0].sort(descending=True).values.cumsum(0) for s in scores]
        got = sum(float(s[n - 1]) for s, n in zip(sums, found, strict=True))
        best = best_by_trying(scores, counts, costs)
        if len(set(costs)) == 1:
            assert found == allocate_blocks(scores, counts) and spent == budget
            assert got == pytest.approx(best, rel=1e-12)
        else:
            assert got >= best - max(float(s.max()) for s in scores)


def test_adaptive_shares_alike_on_all_ranks():
    """Inputs that every rank has must not depend on scores of inputs that each has a part of."""
    chosen = options(adaptive=True, splice_count_w13=0, splice_count_w2=0)
    found = []
    for rank in range(2):
        states = [
            new_site_state(Site("q", "linear", K, K), chosen),
            new_site_state(Site("k", "linear", K, K), chosen),
            new_site_state(Site("o", "linear", K, 2 * K, rank * K), chosen),
        ]
        feed(states[0], normal(32, K), chosen)
        feed(states[1], normal(32, K, seed=1) * 1.1, chosen)
        feed(states[2], normal(32, K, seed=2) * 10.0**rank, chosen)
        refresh(states, chosen)
        found.append([s.selection.blocks.tolist() for s in states])
    assert found[0][:2] == found[1][:2]
