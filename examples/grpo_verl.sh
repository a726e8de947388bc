#!/usr/bin/env bash
# GRPO with verl 0.9.1: NVFP4 rollouts in vLLM, QAT in the FSDP2 actor, the sequence filter.
#
#     MODEL=Qwen/Qwen3-30B-A3B DATA=~/data/gsm8k bash examples/grpo_verl.sh
#     ... bash examples/grpo_verl.sh --cfg job          # prints the settings, runs nothing
#
# DATA holds train.parquet and test.parquet as verl's examples/data_preprocess writes them.
set -euo pipefail
: "${MODEL:?a model path}" "${DATA:?a folder with train.parquet and test.parquet}"

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size="${BATCH:-128}" \
    data.max_prompt_length=512 \
    data.max_response_length="${RESPONSE:-1024}" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.qat.enable=True \
    actor_rollout_ref.actor.fsdp_config.qat.mode=quads_nvfp4 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size="${BATCH:-128}" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    algorithm.rollout_correction.rollout_is=token \
    algorithm.rollout_correction.rollout_is_threshold=2.0 \
    algorithm.rollout_correction.rollout_rs=seq_tim \
    algorithm.rollout_correction.rollout_rs_threshold=0.01 \
    trainer.logger='["console"]' \
    trainer.n_gpus_per_node="${GPUS:-8}" \
    trainer.nnodes=1 \
    trainer.total_training_steps="${STEPS:-20}" \
    "$@"
