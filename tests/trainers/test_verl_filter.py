"""``rollout_rs=seq_tim`` inside verl's own rollout correction."""

import numpy as np
import pytest
import torch

verl = pytest.importorskip("verl", reason="needs verl: make test-trainers")

from verl.protocol import DataProto  # noqa: E402
from verl.trainer.ppo import rollout_corr_helper  # noqa: E402

from quads_common.mismatch import (  # noqa: E402
    FilterOptions,
    save_options,
    select_sequences,
    sequence_statistics,
)
from tests.mismatch.batches import drifted_batch  # noqa: E402

SEQUENCES = 500


def batch_of(data, **extra):
    """A verl batch whose log ratio is ``data.delta``."""
    rollout = torch.full_like(data.delta, -1.5)
    tensors = {
        "old_log_probs": rollout + data.delta.masked_fill(~data.mask, 0.0),
        "rollout_log_probs": rollout,
        "response_mask": data.mask.long(),
        **extra,
    }
    return DataProto.from_dict(tensors=tensors)


def correct(batch, rs="seq_tim", threshold="0.01"):
    """verl's entry function, the one that its trainers call."""
    config = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    config |= {"rollout_rs": rs, "rollout_rs_threshold": threshold}
    return rollout_corr_helper.compute_rollout_correction_and_add_to_batch(batch, config)


def kept_rows(batch):
    return batch.batch["response_mask"].sum(-1) > 0


@pytest.fixture(scope="module")
def data():
    return drifted_batch(SEQUENCES, 20)


@pytest.mark.parametrize("threshold", [0.01, "0.01", "file"])
def test_seq_tim_drops_exactly_the_drifted(data, threshold, tmp_path):
    if threshold == "file":
        threshold = str(tmp_path / "tim.json")
        save_options(FilterOptions(), threshold)
    out, metrics = correct(batch_of(data), threshold=threshold)
    gone = sorted(data.drifted["medium"] + data.drifted["strong"])
    assert (~kept_rows(out)).nonzero().flatten().tolist() == gone
    whole = out.batch["response_mask"][kept_rows(out)]
    assert torch.equal(whole, data.mask.long()[kept_rows(out)])
    assert metrics["rollout_corr/seq_tim/drop_rate"] == 40 / SEQUENCES
    assert metrics["rollout_corr/rollout_rs_seq_masked_fraction"] == 40 / SEQUENCES
    assert metrics["rollout_corr/logprob_gap/max"] == pytest.approx(
        float(data.delta[data.mask].abs().max()), abs=1e-6
    )
    assert "rollout_is_weights" in out.batch  # verl's importance sampling is left in place


def test_our_mean_k3_is_verls_seq_mean_k3(data):
    """verl's own value of each sequence, through its metric of a batch of one."""
    batch = batch_of(data)
    log_ratio = batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]
    mask = batch.batch["response_mask"]
    ours = sequence_statistics(log_ratio, mask).mean_k3
    assert ours.max() > 0.3
    for row in range(SEQUENCES):
        one = slice(row, row + 1)
        _, metrics = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio[one], mask[one], "seq_mean_k3", 0.01
        )
        theirs = metrics["rollout_rs_seq_mean_k3_max"]
        assert abs(float(ours[row]) - theirs) < 1e-6


def test_the_cap_holds_over_the_whole_batch():
    data = drifted_batch(200, 40)
    out, metrics = correct(batch_of(data))
    assert int((~kept_rows(out)).sum()) == 20
    assert metrics["rollout_corr/seq_tim/capped"] == 1.0
    assert metrics["rollout_corr/seq_tim/qualified_rate"] == 80 / 200


def test_rewards_and_groups_are_taken_from_the_batch(data):
    rewards = torch.zeros_like(data.delta)
    rewards[:, 0] = 1.0
    rewards[data.drifted["strong"], 0] = -1.0
    batch = batch_of(data, token_level_scores=rewards)
    batch.non_tensor_batch["uid"] = np.array([f"p{i // 2}" for i in range(SEQUENCES)], object)
    _, metrics = correct(batch)
    assert metrics["rollout_corr/seq_tim/drop_rate_negative"] == 1.0
    # Groups of two: a partner left alone goes too, within the cap of 50.
    statistics = sequence_statistics(data.delta, data.mask)
    groups = torch.arange(SEQUENCES) // 2
    expected = select_sequences(statistics, FilterOptions(), groups=groups)
    assert metrics["rollout_corr/seq_tim/drop_rate"] == float((~expected.keep).double().mean())
    assert (~expected.keep).sum() > 40


def test_it_stands_beside_verls_own_options(data):
    both, metrics = correct(batch_of(data), "seq_tim,token_k1", "0.01,0.95_1.05")
    alone, _ = correct(batch_of(data), "token_k1", "0.95_1.05")
    ours, _ = correct(batch_of(data))
    expected = alone.batch["response_mask"] * ours.batch["response_mask"]
    assert torch.equal(both.batch["response_mask"], expected)
    assert not torch.equal(expected, ours.batch["response_mask"])
    assert "rollout_corr/rollout_rs_token_k1_masked_fraction" in metrics


@pytest.mark.parametrize(
    ("rs", "threshold", "message"),
    [
        ("seq_tim", "nowhere.json", "must be the k3 limit or a JSON file"),
        ("seq_tim", None, "must be"),
        ("seq_tim,token_k1", "0.01", "one entry for each"),
        ("seq_tim", "0.5_2", "must be the k3 limit or a JSON file, got '0.5_2'"),
        ("seq_tim,seq_tim", "0.01,0.02", "names 'seq_tim' twice"),
        ("seq_tim", "-1", "k3 must be a positive number"),
        ("seq_timm", "0.01", "Invalid rollout_rs option"),
    ],
)
def test_bad_settings_are_named(data, rs, threshold, message):
    with pytest.raises(ValueError, match=message):
        correct(batch_of(data), rs, threshold)


def test_an_all_masked_batch_is_refused_by_verl():
    data = drifted_batch(4, 1)
    data.mask[:] = False
    with pytest.raises(ValueError, match="at least one valid token"):
        correct(batch_of(data))


def test_bypass_mode_is_refused(data):
    """verl's actor calls this function for a micro-batch, in its loss ``bypass_mode``."""
    batch = batch_of(data).batch
    with pytest.raises(ValueError, match=r"needs the whole batch.*bypass_mode=False"):
        rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
            old_log_prob=batch["old_log_probs"],
            rollout_log_prob=batch["rollout_log_probs"],
            response_mask=batch["response_mask"],
            rollout_is=None,
            rollout_rs="seq_tim",
            rollout_rs_threshold="0.01",
        )


def test_other_options_are_verls_own(data):
    """Without seq_tim the result is what verl's function gives."""
    batch = batch_of(data)
    log_ratio = batch.batch["old_log_probs"] - batch.batch["rollout_log_probs"]
    patched = rollout_corr_helper.compute_rollout_rejection_mask
    args = (log_ratio, batch.batch["response_mask"], "seq_mean_k3", 0.01)
    mask, metrics = patched(*args)
    original_mask, original_metrics = patched.__wrapped__(*args)
    assert torch.equal(mask, original_mask) and metrics == original_metrics
