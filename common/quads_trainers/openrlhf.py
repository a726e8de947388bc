"""OpenRLHF: QAT and the sequence filter in its policy actors, through Ray's set-up hook.

    ray job submit --runtime-env-json '{
      "worker_process_setup_hook": "quads_trainers.openrlhf.setup",
      "env_vars": {"VLLM_QUADS_CONFIG": "{\\"enable\\": true}", "VLLM_QUADS_TIM": "{}"}}' -- ...

OpenRLHF has no plug-in point in the trainer. Ray calls ``setup`` in every worker process before
anything else, and OpenRLHF's modules are patched when they are imported. The policy (neither the
reference nor the EMA model) is prepared for QAT with the options of VLLM_QUADS_CONFIG, and
``PolicyLoss`` filters if VLLM_QUADS_TIM is set. The rollout engines need the variable alone.

Ray ships ``PolicyModelActor`` from the driver by value, with the driver's globals: a name replaced
in the worker's ``ppo_actor`` does not reach it. So ``Actor``, which it holds by reference, is
changed in place. Written against OpenRLHF 0.11.2, whose loss was run; its Ray actors were not (they
need CUDA and DeepSpeed), stand-ins of them in Ray were.
"""

import functools
import logging
import os
from types import ModuleType
from typing import Any

import torch

from quads_common.mismatch import FilterOptions, filter_metrics
from quads_common.qat import prepare_qat
from quads_common.qat.weight import prepared_weights
from quads_trainers.filter_environment import filter_options
from quads_trainers.late_patches import patch_when_imported
from quads_trainers.micro_batches import MicroBatchFilter
from quads_trainers.rollout_environment import VARIABLE, environment_options

__all__ = ["filtered_policy_loss", "patch_actor", "patch_ppo_actor", "setup"]

logger = logging.getLogger(f"openrlhf.{__name__}")  # OpenRLHF configures no logger but its own


def setup() -> None:
    """Ray's ``worker_process_setup_hook``; imports nothing of OpenRLHF."""
    patch_when_imported("openrlhf.models.actor", patch_actor)
    patch_when_imported("openrlhf.trainer.ray.ppo_actor", patch_ppo_actor)


def patch_actor(module: ModuleType) -> None:
    """Let ``Actor`` prepare the policy's model, if VLLM_QUADS_CONFIG is set."""
    if not os.environ.get(VARIABLE):
        return
    quads = environment_options()
    initialize = module.Actor.__init__

    @functools.wraps(initialize)
    def __init__(
        self: Any, *args: Any, ds_config: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        zero = (ds_config or {}).get("zero_optimization") or {}
        # Only a configuration to train with has this key; reference and EMA models have another.
        trained = "offload_optimizer" in zero
        if trained and zero.get("stage") == 3:
            raise NotImplementedError(
                "QAT does not know ZeRO-3's partitioned weights: use --ds.zero_stage 2"
            )
        initialize(self, *args, ds_config=ds_config, **kwargs)
        if trained:
            prepare_qat(self.model, quads)
            logger.info("QAT: prepared %d weights of the policy", len(prepared_weights(self.model)))

    module.Actor.__init__ = __init__


def patch_ppo_actor(module: ModuleType) -> None:
    """Check that the policy is prepared, and replace ``PolicyLoss``, as the environment says."""
    if os.environ.get(VARIABLE):
        _refuse_unprepared_policy(module.ActorPPOTrainer)
    options = filter_options()
    if options is not None:
        module.PolicyLoss = filtered_policy_loss(module.PolicyLoss, options)
        _log_filter_metrics(module.ActorPPOTrainer)


def _log_filter_metrics(trainer: Any) -> None:
    """Put the loss's figures among those that ``training_step`` returns to be averaged."""
    step = trainer.training_step

    @functools.wraps(step)
    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        status = step(self, experience, *args, **kwargs)
        metrics = self.actor_loss_fn.tim_metrics
        status["metrics"] |= metrics
        status["weights"] |= dict.fromkeys(metrics, "sample")
        return status

    trainer.training_step = training_step


def _refuse_unprepared_policy(trainer: Any) -> None:
    initialize = trainer.__init__

    @functools.wraps(initialize)
    def __init__(self: Any, strategy: Any, actor: Any, *args: Any, **kwargs: Any) -> None:
        if not prepared_weights(actor.model):
            raise RuntimeError(
                f"{VARIABLE} is set and the policy is not prepared for QAT: this OpenRLHF gives "
                "its Actor another ds_config than 0.11.2 does"
            )
        initialize(self, strategy, actor, *args, **kwargs)

    trainer.__init__ = __init__


def filtered_policy_loss(base: type, options: FilterOptions) -> type:
    """A subclass of OpenRLHF's ``PolicyLoss`` that leaves drifted sequences out.

    It sees one micro-batch at a time, so the cap counts over many (``MicroBatchFilter``). OpenRLHF
    divides by the tokens of the whole batch, dropped ones included: the rest is not scaled up. Of a
    micro-batch that is dropped whole the loss is 0 and the other figures are those of all tokens.
    """

    class QuadsPolicyLoss(base):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tim_filter = MicroBatchFilter(options, logger)
            self.tim_metrics: dict[str, torch.Tensor] = {}  # of the last micro-batch

        def forward(
            self,
            log_probs: torch.Tensor,
            old_log_probs: torch.Tensor,
            advantages: torch.Tensor,
            action_mask: torch.Tensor | None = None,
            rollout_log_probs: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> Any:
            if rollout_log_probs is None or action_mask is None:
                raise ValueError(
                    "the sequence filter needs the rollout's log-probs: set "
                    "--algo.advantage.is_correction_level to token or seq"
                )
            statistics, result = self.tim_filter.select(
                old_log_probs - rollout_log_probs, action_mask
            )
            metrics = filter_metrics(result, statistics, prefix="tim_")
            self.tim_metrics = {name: torch.tensor(value) for name, value in metrics.items()}
            mask = action_mask * result.keep.unsqueeze(-1).to(action_mask.dtype)
            nothing_left = bool((mask.sum() == 0) & (action_mask.sum() > 0))
            if nothing_left:
                mask = action_mask  # OpenRLHF divides by its sum
            loss, *figures = super().forward(
                log_probs, old_log_probs, advantages, mask, rollout_log_probs, **kwargs
            )
            if nothing_left:
                loss = (log_probs * 0).sum().to(loss.dtype)
            return (loss, *figures)

    return QuadsPolicyLoss
