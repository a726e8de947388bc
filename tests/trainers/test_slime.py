"""slime's custom importance-sampling function, called as slime's loss calls it.

slime itself (Megatron, SGLang) is not installed; the interface was read in its source.
"""

from types import SimpleNamespace

import pytest
import torch

from quads_common.mismatch import FilterOptions, select_sequences, sequence_statistics
from quads_trainers import slime
from tests.mismatch.batches import drifted_batch

ARGS = SimpleNamespace(tis_clip=2.0, tis_clip_low=0.0)


@pytest.fixture(autouse=True)
def fresh_cap(monkeypatch):
    monkeypatch.setattr(slime, "_filters", {})


def call(data, args=ARGS, **changes):
    """Lists of one tensor for each sequence, as slime has them."""
    lengths = data.mask.sum(-1).tolist()
    rows = [delta[:n] for delta, n in zip(data.delta, lengths, strict=True)]
    rollout = [torch.full_like(row, -1.0) for row in rows]
    keywords = {
        "pg_loss": torch.ones(sum(lengths), requires_grad=True),
        "train_log_probs": [row + r for row, r in zip(rows, rollout, strict=True)],
        "rollout_log_probs": rollout,
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
        "total_lengths": [n + 5 for n in lengths],
        "response_lengths": lengths,
    }
    return slime.tis_with_filter(args, **(keywords | changes))


def test_masks_and_weights():
    data = drifted_batch(200, 5)
    loss, masks, metrics = call(data)
    keep = select_sequences(sequence_statistics(data.delta, data.mask), FilterOptions()).keep
    assert int((~keep).sum()) == 10
    for mask, kept in zip(masks, keep, strict=True):
        assert mask.dtype == torch.int and bool((mask == 1).all() if kept else not mask.any())
    delta = torch.cat([d[m] for d, m in zip(data.delta, data.mask, strict=True)])
    # delta is recovered from two float32 log-probs, so it carries their rounding
    assert torch.allclose(loss, delta.exp().clamp(max=2.0), rtol=1e-5)
    assert all(value.shape == loss.shape for value in metrics.values())
    assert metrics["tim_drop_rate"].unique().tolist() == pytest.approx([10 / 200])


def test_the_cap_counts_over_micro_batches_and_limits_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("VLLM_QUADS_TIM", '{"max_drop_share": 0.25}')
    dropped = 0
    for seed in range(10):
        _, masks, _ = call(drifted_batch(4, 1, seed=seed))
        dropped += sum(not mask.any() for mask in masks)
    assert dropped == 11  # the share of 40, and one to begin with


def test_a_rollout_that_drifts_as_a_whole_is_warned_of_once(caplog):
    drifted = drifted_batch(40, 0)
    drifted.delta[:] = 1.0
    for expected in (1, 1, 1, 1, 2):  # again after the 128 sequences of a window
        _, _, metrics = call(drifted)
        assert caplog.text.count("the rollout as a whole has drifted") == expected
        assert metrics["tim_capped"].unique().tolist() == [1.0]


def test_what_it_cannot_do_is_refused(monkeypatch):
    data = drifted_batch(4, 1)
    with pytest.raises(NotImplementedError, match="context parallelism"):
        call(data, loss_masks=[torch.ones(3)] * 4)
    with pytest.raises(NotImplementedError, match="recompute_loss_function"):
        call(data, SimpleNamespace(**vars(ARGS), recompute_loss_function=True))
    with pytest.raises(ValueError, match=r"sequence 0 has .* log-probs of the trainer and 3 of"):
        call(data, rollout_log_probs=[torch.zeros(3)] * 4)
    empty = {"train_log_probs": [], "rollout_log_probs": [], "loss_masks": []}
    with pytest.raises(ValueError, match="without sequences"):
        call(data, pg_loss=torch.ones(0), **empty)
    monkeypatch.setenv("VLLM_QUADS_TIM", '{"k4": 1}')
    with pytest.raises(ValueError, match="VLLM_QUADS_TIM: unknown option 'k4'"):
        call(data)
