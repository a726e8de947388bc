"""GRPO with TRL: NVFP4 rollouts in the engine that TRL builds, QAT, the sequence filter.

python examples/grpo_trl.py                       # CPU, a few minutes
python examples/grpo_trl.py --sleep               # GPU: CUDA graphs and sleep level 2
python examples/grpo_trl.py --server URL          # an engine of its own (see docs/trainers.md)
"""

import argparse
import os
import tempfile
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process

import torch
from arithmetic import MODEL, draw_problems, forgetful_model, reward
from datasets import Dataset
from phases import Phases
from transformers import AutoTokenizer
from trl import GRPOConfig

from quads_common.mismatch import FilterOptions
from quads_trainers.trl import QuadsGRPOTrainer


def score(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """TRL's reward function: one number for each completion."""
    return [reward(c, a) for c, a in zip(completions, answer, strict=True)]


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=8, help="a step")
    parser.add_argument("--group", type=int, default=8, help="completions for each prompt")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--forget", type=float, default=0.3, help="noise on the start weights")
    parser.add_argument("--act", choices=("nvfp4", "bf16"), default="nvfp4", help="W4A4 or W4A16")
    parser.add_argument("--method", default="nvfp4", help="compensation preset of the engine")
    parser.add_argument("--sleep", action="store_true", help="free the engine's memory in training")
    parser.add_argument("--memory", type=float, default=0.2, help="vLLM's share of the memory")
    parser.add_argument("--server", help="base URL of a vllm serve; default: colocate")
    return parser.parse_args()


def build_trainer(args: argparse.Namespace, output: str) -> QuadsGRPOTrainer:
    """The trainer; what is not plain TRL stands in the last lines."""
    cpu = not torch.cuda.is_available()
    problems = draw_problems(args.steps * args.prompts, seed=0)
    config = GRPOConfig(
        output_dir=output,
        use_vllm=True,
        vllm_mode="server" if args.server else "colocate",
        vllm_server_base_url=args.server,
        vllm_enable_sleep_mode=args.sleep,
        vllm_gpu_memory_utilization=args.memory,
        vllm_max_model_length=256,
        use_cpu=cpu,
        bf16=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=args.prompts * args.group,
        num_generations=args.group,
        max_completion_length=8,
        temperature=1.0,
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    return QuadsGRPOTrainer(
        model=forgetful_model(args.model, args.forget),
        reward_funcs=score,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": p, "answer": a} for p, a in problems]),
        processing_class=AutoTokenizer.from_pretrained(args.model),
        quads={"method": args.method, "act": args.act},
        # Answers have five tokens, so that one token decides the mean: a higher limit.
        tim_filter=FilterOptions(k3=0.1),
        check_sync=True,
    )


def time_phases(trainer: QuadsGRPOTrainer, phases: Phases) -> None:
    """Time what a step consists of, by wrapping the trainer's methods."""

    def timed(owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with phases(name):
                return original(*args, **kwargs)

        setattr(owner, method, wrapper)

    timed(trainer.vllm_generation, "sync_weights", "sync + check")
    timed(trainer.vllm_generation, "generate", "generate")
    timed(trainer, "_get_per_token_logps_and_entropies", "forward")
    timed(trainer, "training_step", "whole step")


def main() -> None:
    """Train and print the log and the time of the phases."""
    args = parse_args()
    with tempfile.TemporaryDirectory() as output:
        trainer, phases = build_trainer(args, output), Phases()
        time_phases(trainer, phases)
        trainer.train()
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print(
                f"step {entry['step']:3d}  reward {entry['reward']:.3f}  loss {entry['loss']:+.4f}"
                f"  gap mean {entry['logprob_gap/mean']:.4f} max {entry['logprob_gap/max']:.3f}"
                f"  dropped {entry['tim/drop_rate']:.1%}"
            )
    print(f"{len(trainer.synced_tensors)} syncs, {set(trainer.synced_tensors)} tensors equal")
    print(f"\n{phases}")


if __name__ == "__main__":
    main()
