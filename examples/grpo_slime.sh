#!/usr/bin/env bash
# What NVFP4 rollouts and the sequence filter add to a slime command (SGLang, Megatron).
#
#     bash examples/grpo_slime.sh $YOUR_SLIME_ARGUMENTS          # in a checkout of slime
#
# Not run by us. slime trains in Megatron, for which there is no QAT here: this is a W4A4 rollout
# of a BF16 trainer, which the papers saw collapse (docs/trainers.md). Prefer act: bf16 (W4A16).
set -euo pipefail

export VLLM_QUADS_TIM="${VLLM_QUADS_TIM:-{\"k3\": 0.01\}}"
exec python3 train.py \
    --sglang-quantization quads_nvfp4 \
    --sglang-json-model-override-args '{"quantization_config": {"quant_method": "quads_nvfp4", "act": "bf16"}}' \
    --use-tis \
    --tis-clip 2.0 \
    --custom-tis-function-path quads_trainers.slime.tis_with_filter \
    "$@"
