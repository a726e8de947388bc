"""TRL: a ``GRPOTrainer`` whose rollouts run in NVFP4 and whose forward uses the same weights.

    trainer = QuadsGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(use_vllm=True, ...))

It adds three things to TRL's own trainer and changes nothing else: the rollout method is switched
on for the engine that TRL builds, the policy is prepared for QAT, and sequences that drifted too
far are left out of the loss. Tried with TRL 1.16.0.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOTrainer

from quads_common.mismatch import (
    FilterOptions,
    FilterResult,
    SequenceStatistics,
    filter_metrics,
    gap_report,
    select_sequences,
    sequence_statistics,
)
from quads_common.options import QUANT_METHOD
from quads_common.qat import prepare_qat
from quads_trainers.rollout_environment import (
    VARIABLE,
    check_enabled,
    environment_options,
    rollout_method,
)
from quads_trainers.sync_check import check_in_sync, check_server_in_sync

__all__ = ["QuadsGRPOTrainer"]

logger = logging.getLogger(__name__)

# How each loss of TRL averages; decides how it is to be renormalized over what remains.
TOKENS_OF_BATCH = ("dapo", "cispo")  # by num_items_in_batch, which we can reduce
TOKENS_OF_MICRO_BATCH = ("bnpo",)
SEQUENCES = ("grpo", "sapo", "luspo")
CONSTANT = ("dr_grpo",)
# vespo takes the logarithm of the ratio, so a ratio of 0 does not remove a sequence.


class QuadsGRPOTrainer(GRPOTrainer):
    """``GRPOTrainer`` with NVFP4 rollouts.

    quads: options of the method (``QuadsOptions`` as a dict), used for the engine and for QAT.
        With ``vllm_mode="server"`` say the same to ``vllm serve``. Default: what
        VLLM_QUADS_CONFIG holds, else the defaults.
    tim_filter: limits of the sequence filter; None switches it off.
    qat: train with the weights that the rollout serves.
    check_sync: after every weight sync compare fingerprints of all quantized weights and raise
        ``WeightsDifferError`` if one differs.

    Raises:
        ValueError: the filter with a loss or settings that cannot leave a sequence out; no vLLM;
            an engine that is not quantized with ``quads_nvfp4`` (colocate mode).
        NotImplementedError: from ``prepare_qat`` (LoRA among others), and ZeRO-3, FSDP1.
    """

    def __init__(
        self,
        *args: Any,
        quads: Mapping[str, Any] | None = None,
        tim_filter: FilterOptions | None = FilterOptions(),  # noqa: B008 (frozen)
        qat: bool = True,
        check_sync: bool = False,
        **kwargs: Any,
    ) -> None:
        config = kwargs["args"] if "args" in kwargs else (args[2] if len(args) > 2 else None)
        if config is None or not config.use_vllm:
            raise ValueError("QuadsGRPOTrainer needs GRPOConfig(use_vllm=True, ...) as args")
        if check_sync and not qat:
            raise ValueError("check_sync compares with the trainer's QAT weights: it needs qat")
        if check_sync and config.vllm_mode == "colocate" and config.vllm_tensor_parallel_size > 1:
            raise ValueError("check_sync needs vllm_tensor_parallel_size=1 in colocate mode")
        if tim_filter is not None:
            _check_filterable(config)
        self.tim_filter = tim_filter
        self.synced_tensors: list[int] = []  # one entry for each checked sync
        if os.environ.get(VARIABLE) or config.vllm_mode == "server":
            if quads is not None and os.environ.get(VARIABLE):
                raise ValueError(f"give options in {VARIABLE} or as quads, not in both")
            if config.vllm_mode == "colocate":
                check_enabled()
            options = dict(environment_options() if quads is None else quads)
            super().__init__(*args, **kwargs)
        else:
            options = dict(quads or {})
            with rollout_method(options):
                super().__init__(*args, **kwargs)
        if config.vllm_mode == "colocate":
            _refuse_other_quantization(self.vllm_generation.llm)
        if qat:
            self._refuse_unsupported_sharding()
            prepare_qat(self.model, options)
        if check_sync:
            self._check_every_sync()

    def _refuse_unsupported_sharding(self) -> None:
        state = self.accelerator.state
        plugin = getattr(state, "fsdp_plugin", None)
        if plugin is not None and getattr(plugin, "fsdp_version", 1) == 1:
            raise NotImplementedError("QAT needs FSDP2: set fsdp_version: 2")
        deepspeed = getattr(state, "deepspeed_plugin", None)
        if deepspeed is not None and deepspeed.zero_stage == 3:
            raise NotImplementedError("QAT does not know ZeRO-3's partitioned weights: use FSDP2")

    def _check_every_sync(self) -> None:
        generation = self.vllm_generation
        sync = generation.sync_weights

        def sync_and_check() -> None:
            sync()
            model = self.accelerator.unwrap_model(self.model)
            if generation.mode == "colocate":
                checked = check_in_sync(model, generation.llm)
            else:
                # One server for all processes: the main one asks it.
                main = self.accelerator.is_main_process
                url = generation.vllm_client.base_url if main else None
                checked = check_server_in_sync(model, url)
            self.synced_tensors.append(checked)

        generation.sync_weights = sync_and_check

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self._log_gap(output)
            if self.tim_filter is not None:
                self._leave_out_drifted(output, self.tim_filter)
        return output

    def _gap(self, output: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """logp_train - logp_rollout and the mask of response tokens, [B, T] of this process."""
        if "sampling_per_token_logps" not in output or "old_per_token_logps" not in output:
            return None
        mask = output["completion_mask"]
        if "tool_mask" in output:
            mask = mask * output["tool_mask"]
        return output["old_per_token_logps"] - output["sampling_per_token_logps"], mask

    def _log_gap(self, output: dict[str, Any]) -> None:
        """Figures of all processes' sequences."""
        gap = self._gap(output)
        if gap is None:
            return
        delta, mask = (self._gathered(tensor) for tensor in gap)
        for name, value in gap_report(delta, mask).to_metrics().items():
            self._metrics["train"][name].append(value)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, T] of all processes; they may have padded to other lengths, which zeros fill up."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(tensor, dim=1))

    def _leave_out_drifted(self, output: dict[str, Any], options: FilterOptions) -> None:
        delta, mask = self._gap(output)
        own = sequence_statistics(delta, mask, tail_nats=options.tail_nats)
        gathered = own.map(self.accelerator.gather)
        groups = torch.arange(len(gathered.length), device=delta.device) // self.num_generations
        result = select_sequences(gathered, options, groups=groups)
        signal = self.accelerator.gather(_per_sequence(output["advantages"]))
        for name, value in filter_metrics(result, gathered, signal=signal).items():
            self._metrics["train"][name].append(value)
        if result.capped:
            self._warn_capped(result)
        first = self.accelerator.process_index * len(delta)
        keep = result.keep[first : first + len(delta)]
        self._apply(output, keep, _remaining(result, gathered))

    def _apply(
        self, output: dict[str, Any], keep: torch.Tensor, remaining: tuple[float, float]
    ) -> None:
        """Weight 0 for what is dropped; the loss averages over the rest, of all processes."""
        sequences, tokens = remaining
        weight = keep.to(output["importance_sampling_ratio"].dtype)
        if self.loss_type in TOKENS_OF_BATCH:
            output["num_items_in_batch"] = output["num_items_in_batch"] * tokens
        elif self.loss_type in SEQUENCES and sequences:
            weight = weight / sequences
        elif self.loss_type in TOKENS_OF_MICRO_BATCH and tokens:
            weight = weight / tokens
        ratio = output["importance_sampling_ratio"]
        output["importance_sampling_ratio"] = ratio * weight.unsqueeze(1)

    def _warn_capped(self, result: FilterResult) -> None:
        if self.accelerator.is_main_process:
            qualified, dropped = int(result.qualified.sum()), int((~result.keep).sum())
            logger.warning(
                "%d of %d sequences drifted beyond the limits, the cap let %d be dropped: the "
                "rollout as a whole has drifted",
                qualified,
                len(result.keep),
                dropped,
            )


def _refuse_other_quantization(engine: Any) -> None:
    found = engine.llm_engine.vllm_config.model_config.quantization
    if found != QUANT_METHOD:
        raise ValueError(
            f"the engine that TRL built has quantization={found!r}, expected {QUANT_METHOD!r}: "
            f'look at the model\'s own quantization_config and at "model" in {VARIABLE}'
        )


def _check_filterable(config: Any) -> None:
    if not config.vllm_importance_sampling_correction:
        raise ValueError(
            "the sequence filter works through TRL's importance sampling ratio: leave "
            "vllm_importance_sampling_correction=True, or pass tim_filter=None"
        )
    known = (*TOKENS_OF_BATCH, *TOKENS_OF_MICRO_BATCH, *SEQUENCES, *CONSTANT)
    if config.loss_type not in known:
        raise ValueError(
            f"the sequence filter does not support loss_type {config.loss_type!r}: one of "
            f"{list(known)}, or pass tim_filter=None"
        )


def _per_sequence(advantages: torch.Tensor) -> torch.Tensor:
    return advantages if advantages.dim() == 1 else advantages[:, 0]


def _remaining(result: FilterResult, statistics: SequenceStatistics) -> tuple[float, float]:
    """Share of sequences and of tokens that are kept."""
    tokens = statistics.length + statistics.unscored
    kept = (tokens * result.keep).sum().double() / tokens.sum().clamp(min=1)
    return float(result.keep.double().mean()), float(kept)
