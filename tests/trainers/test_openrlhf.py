"""OpenRLHF 0.11.2: its loss with the filter, and an emulation of its weight sync.

Its Ray actors and its ``WorkerWrap`` (CUDA only) cannot run here; the loop that they run is done
by ``run_openrlhf_emulation.py``.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from quads_common.fingerprint import differing
from quads_common.mismatch import FilterOptions, select_sequences, sequence_statistics
from quads_trainers import openrlhf
from tests.mismatch.batches import drifted_batch
from tests.trainers.running import run_script

pytest.importorskip("openrlhf", reason="needs OpenRLHF: make test-trainers")


def module_of_openrlhf(name):
    """A module of OpenRLHF without its package's __init__, which imports what needs CUDA.

    ``deepspeed``, which a neighbour imports and the loss never calls, is an empty module.
    """
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    (folder,) = importlib.util.find_spec("openrlhf").submodule_search_locations
    package = ModuleType("openrlhf_models_alone")
    package.__path__ = [str(Path(folder) / "models")]
    sys.modules[package.__name__] = package
    return importlib.import_module(f"{package.__name__}.{name}")


@pytest.fixture(scope="module")
def policy_loss():
    return module_of_openrlhf("loss").PolicyLoss


def arguments(data):
    rollout = torch.full_like(data.delta, -1.0)
    old = rollout + data.delta.masked_fill(~data.mask, 0.0)
    log_probs = (old + 0.01).requires_grad_()
    advantages = torch.randn(len(data.delta), 1).expand_as(data.delta)
    return log_probs, old, advantages, data.mask.float(), rollout


def test_dropped_sequences_get_no_gradient(policy_loss):
    data = drifted_batch(100, 4)
    log_probs, old, advantages, mask, rollout = arguments(data)
    filtered = openrlhf.filtered_policy_loss(policy_loss, FilterOptions())
    options = {"is_correction_level": "token"}
    loss = filtered(**options)(log_probs, old, advantages, mask, rollout)[0]
    (gradient,) = torch.autograd.grad(loss, log_probs)
    keep = select_sequences(sequence_statistics(data.delta, data.mask), FilterOptions()).keep
    assert int((~keep).sum()) == 8
    assert not gradient[~keep].any()
    # The rest is OpenRLHF's own loss with those sequences masked.
    own = policy_loss(**options)(log_probs, old, advantages, mask * keep[:, None], rollout)[0]
    (expected,) = torch.autograd.grad(own, log_probs)
    assert torch.equal(gradient, expected) and torch.equal(loss, own)


def test_micro_batches_share_one_cap(policy_loss):
    loss = openrlhf.filtered_policy_loss(policy_loss, FilterOptions())(is_correction_level="token")
    for seed in range(10):
        loss(*arguments(drifted_batch(4, 1, seed=seed)))
    assert (loss.tim_filter.cap.seen, loss.tim_filter.cap.dropped) == (40, 5)


@pytest.mark.parametrize("settings", [{}, {"token_level_loss": False}], ids=["token", "sample"])
def test_a_micro_batch_that_is_dropped_whole_has_no_loss_and_finite_figures(policy_loss, settings):
    options = FilterOptions(max_drop_share=1.0)
    loss = openrlhf.filtered_policy_loss(policy_loss, options)(
        is_correction_level="token", **settings
    )
    data = drifted_batch(4, 0)
    data.delta[:] = 1.5
    log_probs, *rest = arguments(data)
    value, *figures = loss(log_probs, *rest)
    (gradient,) = torch.autograd.grad(value, log_probs)
    assert value.item() == 0.0 and not gradient.any()
    assert all(figure.isfinite() for figure in figures)


def test_the_filters_figures_are_logged_and_the_alarm_warns(policy_loss, caplog, monkeypatch):
    monkeypatch.setattr(openrlhf.logger, "parent", None)  # of OpenRLHF, which does not propagate
    openrlhf.logger.addHandler(caplog.handler)

    class Trainer:
        def training_step(self, experience, scale):
            self.actor_loss_fn(*experience)
            return {"metrics": {"policy_loss": scale}, "weights": {"policy_loss": "token"}}

    monkeypatch.setenv("VLLM_QUADS_TIM", "{}")
    module = SimpleNamespace(ActorPPOTrainer=Trainer, PolicyLoss=policy_loss)
    openrlhf.patch_ppo_actor(module)
    trainer = Trainer()
    trainer.actor_loss_fn = module.PolicyLoss(is_correction_level="token")
    status = trainer.training_step(arguments(drifted_batch(20, 5)), 3)
    openrlhf.logger.removeHandler(caplog.handler)
    assert status["metrics"]["policy_loss"] == 3 and status["weights"]["policy_loss"] == "token"
    assert float(status["metrics"]["tim_capped"]) == 1.0
    assert float(status["metrics"]["tim_qualified_rate"]) == 0.5
    assert float(status["metrics"]["tim_drop_rate"]) == pytest.approx(3 / 20)
    assert status["weights"]["tim_drop_rate"] == "sample"
    assert "10 of a micro-batch of 20 sequences drifted" in caplog.text


def test_it_needs_the_rollouts_log_probs(policy_loss):
    loss = openrlhf.filtered_policy_loss(policy_loss, FilterOptions())()
    with pytest.raises(ValueError, match="is_correction_level"):
        loss(*arguments(drifted_batch(4, 1))[:4])


@pytest.fixture(scope="module")
def in_ray(tmp_path_factory):
    return run_script("run_openrlhf_ray.py", tmp_path_factory.mktemp("ray"))


def test_in_a_ray_actor_the_policy_alone_is_prepared(in_ray):
    assert in_ray["policy"] == {"weights": 8, "rules": ["te"]}
    assert in_ray["reference"]["weights"] == in_ray["ema"]["weights"] == 0


def test_in_a_ray_actor_the_loss_is_filtered(in_ray):
    assert in_ray["loss"] == "QuadsPolicyLoss"


def test_in_a_ray_actor_zero_3_and_an_unprepared_policy_are_refused(in_ray):
    assert "use --ds.zero_stage 2" in in_ray["zero_3"]
    assert "is not prepared for QAT" in in_ray["unprepared"]


class Untouched:
    def __init__(self):
        pass


def test_without_the_variables_nothing_is_replaced():
    module = SimpleNamespace(Actor=Untouched, ActorPPOTrainer=Untouched, PolicyLoss=Untouched)
    before = Untouched.__init__
    openrlhf.patch_actor(module)
    openrlhf.patch_ppo_actor(module)
    assert module.PolicyLoss is Untouched and Untouched.__init__ is before


@pytest.mark.engine
def test_emulated_per_tensor_sync(tmp_path):
    """An emulation: one tensor a call, BF16, nothing afterwards; not OpenRLHF's own actors."""
    seen = run_script("run_openrlhf_emulation.py", tmp_path)
    assert seen["quantization"] == "quads_nvfp4"
    for facts in seen["steps"]:
        assert len(facts["trainer"]) == 128 and not differing(facts["trainer"], facts["engine"])
    first, last = seen["steps"][0]["trainer"], seen["steps"][-1]["trainer"]
    assert len(differing(first, last)) == 128
    stale = differing(seen["skipped"]["trainer"], seen["skipped"]["engine"])
    # A stacked tensor that is not sent leaves every expert of its layer as it was.
    assert stale == sorted(f"model.layers.1.mlp.experts.{e}.w2" for e in range(16))
