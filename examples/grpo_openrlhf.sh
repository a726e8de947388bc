#!/usr/bin/env bash
# GRPO with OpenRLHF 0.11.2: NVFP4 rollouts, QAT in the policy actors, the sequence filter.
#
#     ray start --head --num-gpus 8
#     MODEL=Qwen/Qwen3-30B-A3B DATA=prompts.jsonl REWARD=reward.py bash examples/grpo_openrlhf.sh
#
# Not run by us: OpenRLHF's actors need CUDA and DeepSpeed. Its loss with the filter was run, and
# its weight sync was emulated (tests/trainers/test_openrlhf.py).
set -euo pipefail
: "${MODEL:?a model path}" "${DATA:?a prompt data set}" "${REWARD:?a reward URL or file}"

exec ray job submit --address http://127.0.0.1:8265 --runtime-env-json '{
    "worker_process_setup_hook": "quads_trainers.openrlhf.setup",
    "env_vars": {
        "VLLM_QUADS_CONFIG": "{\"enable\": true}",
        "VLLM_QUADS_TIM": "{\"k3\": 0.01}"
    }
}' -- python3 -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path "$MODEL" \
    --reward.remote_url "$REWARD" \
    --data.prompt_dataset "$DATA" \
    --data.input_key prompt \
    --data.label_key answer \
    --algo.advantage.estimator group_norm \
    --algo.advantage.is_correction_level token \
    --algo.kl.init_coef 0 \
    --rollout.n_samples_per_prompt 8 \
    --rollout.batch_size 128 \
    --train.batch_size 1024 \
    --ds.zero_stage 2 \
    --ds.param_dtype bf16 \
    --vllm.num_engines 8 \
    --vllm.tensor_parallel_size 1 \
    --vllm.enable_sleep \
    --vllm.sync_backend nccl \
    "$@"
