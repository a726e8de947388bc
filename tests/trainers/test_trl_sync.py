"""TRL 1.16.0's GRPOTrainer as released, colocate mode: the trainer of examples/grpo_trl.py."""

import math

import pytest

from quads_common.fingerprint import differing
from tests.trainers.running import run_script

pytestmark = pytest.mark.engine

STEPS = 20
TENSORS = 4 * 16 * 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_script("run_trl.py", tmp_path_factory.mktemp("trl"), STEPS)


def test_the_engine_that_trl_built_is_quantized(seen):
    assert seen["quantization"] == "quads_nvfp4"


def test_fingerprints_equal_after_every_step(seen):
    assert len(seen["syncs"]) == STEPS
    assert seen["checked"][:STEPS] == [TENSORS] * STEPS
    for facts in seen["syncs"]:
        assert len(facts["trainer"]) == TENSORS
        assert not differing(facts["trainer"], facts["engine"])


def test_every_step_moved_the_codes(seen):
    for before, after in zip(seen["syncs"], seen["syncs"][1:], strict=False):
        assert len(differing(before["trainer"], after["trainer"])) > TENSORS / 2


def test_losses_are_finite_and_the_filter_reports(seen):
    entries = [entry for entry in seen["log"] if "loss" in entry]
    assert len(entries) == STEPS
    for entry in entries:
        assert math.isfinite(float(entry["loss"])) and math.isfinite(float(entry["grad_norm"]))
        assert 0 <= entry["tim/drop_rate"] <= 0.1
        assert entry["logprob_gap/mean"] > 0
    # TRL's own figure of the same gap, computed by its own code.
    for entry in entries:
        own = entry["sampling/sampling_logp_difference/mean"]
        assert entry["logprob_gap/mean"] == pytest.approx(own, rel=1e-4)


def test_a_skipped_expert_is_noticed(seen):
    assert seen["skipped"].startswith(f"1 of {TENSORS} quantized tensors differ")
    assert "model.layers.1.mlp.experts.5.w2" in seen["skipped"]


def test_the_next_full_sync_repairs(seen):
    assert seen["repaired"] == ""


def test_another_scale_rule_is_noticed(seen):
    assert seen["other_rule"].startswith(f"{TENSORS} of {TENSORS} quantized tensors differ")
