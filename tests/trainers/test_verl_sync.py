"""verl 0.9.1 as released: FSDP2 engine, bucketed sender and receiver, vLLM worker extension."""

import math

import pytest

from quads_common.fingerprint import differing
from tests.trainers.running import run_script

pytestmark = pytest.mark.engine

STEPS = 20
TENSORS = 4 * 16 * 2


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return run_script("run_verl.py", tmp_path_factory.mktemp("verl"), STEPS)


def wrong(facts):
    return differing(facts["trainer"], facts["engine"])


def test_verl_loaded_the_plugin_by_its_entry_point(seen):
    assert seen["plugin"]


def test_fingerprints_equal_after_every_step(seen):
    assert len(seen["steps"]) == STEPS
    for facts in seen["steps"]:
        assert len(facts["trainer"]) == TENSORS
        assert not wrong(facts)
        assert math.isfinite(facts["loss"]) and math.isfinite(facts["gradient_norm"])


def test_every_step_moved_the_codes(seen):
    """Else equality after the first sync would say nothing about the others."""
    for before, after in zip(seen["steps"], seen["steps"][1:], strict=False):
        assert len(differing(before["trainer"], after["trainer"])) > TENSORS / 2


def test_before_the_first_sync_everything_differs(seen):
    assert len(wrong(seen["before"])) == TENSORS


def test_a_skipped_expert_is_noticed(seen):
    assert wrong(seen["skipped"]) == ["model.layers.1.mlp.experts.5.w2"]


def test_half_a_unit_is_noticed(seen):
    assert wrong(seen["half"]) == ["model.layers.2.mlp.experts.3.w13"]


def test_the_next_full_sync_repairs(seen):
    assert not wrong(seen["repaired"])


def test_another_scale_rule_is_noticed(seen):
    assert len(wrong(seen["other_rule"])) == TENSORS
