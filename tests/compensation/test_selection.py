"""Counts, ranking, ties, lists in place; the allocation of blocks to layers."""

import itertools

import numpy as np
import pytest
import torch

from quads_common.compensation import CompensationOptions, Site
from quads_common.compensation.adaptive import allocate_blocks
from quads_common.compensation.selection import (
    ascending_ids,
    block_count,
    channel_count,
    checksums,
    hot_mask,
    jaccard,
    new_selection,
    top_mask,
    write_selection,
)


@pytest.mark.parametrize(
    ("ratio", "width", "count"),
    [
        (0, 2048, 0),
        (0.5, 2048, 64),
        (0.5, 768, 24),
        (0.5, 48, 2),  # 1.5 rounds up
        (0.5, 80, 3),  # 2.5 rounds up, not to even
        (0.125, 192, 2),  # 1.5
        (0.285, 1600, 29),  # 28.5 exactly, which binary floating point makes 28.499...
        (0.01, 64, 1),  # at least 1
        (0.3, 64, 1),  # 1.2
        (0.4, 64, 2),  # 1.6
        (1, 48, 3),
        (1.0, 2048, 128),
    ],
)
def test_block_count(ratio, width, count):
    assert block_count(ratio, width) == count


@pytest.mark.parametrize(
    ("count", "shards", "width", "channels"),
    [
        (64, 1, 2048, 64),
        (32, 1, 768, 32),
        (32, 2, 384, 16),
        (64, 2, 1024, 32),
        (64, 8, 256, 16),  # 8 rounds up to 16
        (96, 4, 192, 32),  # 24 rounds up to 32
        (1, 1, 2048, 16),
        (64, 1, 48, 48),  # at most K_local
        (0, 1, 2048, 0),
    ],
)
def test_channel_count(count, shards, width, channels):
    assert channel_count(count, shards, width) == channels


def test_top_mask_takes_the_highest_and_of_equals_the_lowest_index():
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0], [0.0, 0.0, 0.0, 1.0]])
    assert top_mask(scores, 2).int().tolist() == [[0, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 1]]
    assert not top_mask(scores, 0).any() and top_mask(scores, 4).all()
    counts = torch.tensor([[0], [1], [3]])
    assert top_mask(scores, counts).int().tolist() == [[0] * 4, [1, 0, 0, 0], [1, 1, 0, 1]]


def test_ties_on_many_equal_scores():
    scores = torch.tensor([float(i % 3) for i in range(3000)]).unsqueeze(0)
    mask = top_mask(scores, 1500)
    want = [i for i in range(3000) if i % 3 == 2] + [i for i in range(3000) if i % 3 == 1][:500]
    assert mask[0].nonzero().flatten().tolist() == sorted(want)


def test_ascending_ids():
    mask = torch.tensor([[True, False, True, False], [False] * 4, [True] * 4])
    assert ascending_ids(mask, 3).tolist() == [[0, 2, -1], [-1] * 3, [0, 1, 2]]
    assert ascending_ids(mask, 3).dtype == torch.int32


def test_jaccard():
    a = torch.tensor([[True, True, False, False], [True, True, True, False], [False] * 4])
    b = torch.tensor([[True, False, True, False], [False, False, False, True], [False] * 4])
    assert jaccard(a, b).tolist() == pytest.approx([1 / 3, 0, 1])
    assert jaccard(a, a).tolist() == [1, 1, 1]


def site(kind: str = "w2", width: int = 64, groups: int = 3, shards: int = 1, shard: int = 0):
    return Site(
        f"layers.0.{kind}", kind, width, width * shards, width * shard, tuple(range(groups)), groups
    )


def test_a_new_selection_uses_every_block_and_no_channel():
    options = CompensationOptions.from_preset("quads_splice")
    found = new_selection(site(), options)
    assert found.blocks.tolist() == [[0, 1, 2, 3]] * 3 and found.block_mask.all()
    assert found.channels.shape == (3, 32) and found.channels.eq(-1).all()
    assert new_selection(site(shards=2), options).channels.shape == (3, 16)
    plain = new_selection(site(), CompensationOptions.from_preset("foursight"))
    assert plain.blocks.eq(-1).all() and not plain.block_mask.any()


def test_compensation_says_what_is_off():
    both = CompensationOptions.from_preset("quads_splice")
    rac, splice = CompensationOptions.from_preset("quads"), CompensationOptions(splice_count_w2=16)
    for options, blocks, channels in ((both, True, True), (rac, True, False), (splice, 0, True)):
        found = new_selection(site(), options).compensation(options, "w2")
        assert (found.block_mask is not None, found.channels is not None) == (blocks, channels)
        assert (found.hot_bits is not None) == channels
    other = CompensationOptions.from_preset("quads", {"compensate": ["w13"], "rac_alpha": 0.5})
    found = new_selection(site(), other).compensation(other, "w2")
    assert found.block_mask is None and found.alpha == 0.5


def test_lists_are_written_in_place():
    selection = new_selection(site(), CompensationOptions.from_preset("quads_splice"))
    before = {name: t.data_ptr() for name, t in selection.buffers().items()}
    digest = checksums([selection])
    blocks = torch.zeros(3, 4, dtype=torch.bool)
    blocks[0, [1, 3]] = True
    hot = torch.zeros(3, 64, dtype=torch.bool)
    hot[1, [7, 2, 63]] = True
    write_selection(selection, blocks, hot)
    assert selection.blocks.tolist() == [[1, 3, -1, -1], [-1] * 4, [-1] * 4]
    assert selection.channels[1, :4].tolist() == [2, 7, 63, -1]
    assert torch.equal(hot_mask(selection, 64), hot) and torch.equal(selection.block_mask, blocks)
    assert selection.hot_bits.tolist() == [[0] * 4, [1 << 2 | 1 << 7, 0, 0, 1 << 15], [0] * 4]
    assert {name: t.data_ptr() for name, t in selection.buffers().items()} == before
    assert checksums([selection]) != digest
    write_selection(selection, torch.ones(3, 4, dtype=torch.bool), hot & ~hot)
    assert checksums([selection]) == digest
    assert not selection.hot_bits.any()


def best_allocation(scores: list[np.ndarray], total: int) -> float:
    """The largest energy that any allocation of ``total`` blocks, at least 1 each, removes."""
    worth = [np.sort(s, axis=1)[:, ::-1].mean(axis=0) for s in scores]
    choices = itertools.product(*(range(1, len(w) + 1) for w in worth))
    return max(
        sum(float(w[:n].sum()) for w, n in zip(worth, chosen, strict=True))
        for chosen in choices
        if sum(chosen) == total
    )


@pytest.mark.parametrize("seed", range(5))
def test_allocation_is_the_best_of_all(seed):
    generator = np.random.default_rng(seed)
    scores = [generator.random((g, 5)) * 10.0**e for g, e in ((1, 0), (3, 1), (2, -1))]
    counts = [2, 3, 2]
    found = allocate_blocks([torch.from_numpy(s) for s in scores], counts)
    assert sum(found) == sum(counts) and min(found) >= 1
    removed = sum(
        float(np.sort(s, axis=1)[:, ::-1].mean(axis=0)[:n].sum())
        for s, n in zip(scores, found, strict=True)
    )
    assert removed == pytest.approx(best_allocation(scores, sum(counts)))


def test_allocation_gives_more_to_larger_residuals_and_keeps_the_total():
    base = torch.rand(1, 64) + 0.5
    found = allocate_blocks([base * f for f in (1.0, 4.0, 0.1, 2.0)], [32] * 4)
    assert sum(found) == 128 and found[1] >= found[3] > found[0] > found[2] >= 1, found


def test_allocation_of_equal_layers_is_deterministic():
    equal = [torch.ones(1, 8)] * 3
    assert allocate_blocks(equal, [4, 4, 4]) == [8, 3, 1]  # the earlier site first
    assert allocate_blocks(equal, [8, 8, 8]) == [8, 8, 8]
    assert allocate_blocks([], []) == []
