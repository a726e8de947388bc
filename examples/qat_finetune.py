"""Fine-tune a small MoE with QAT and save, every few steps, what a rollout engine is to serve.

    python examples/qat_finetune.py --out /tmp/qat          # a few minutes on a CPU

The trainer keeps FP32 masters and computes with the decoded NVFP4 weights. Each checkpoint is
plain BF16; beside it lies fingerprints.json, which an engine that loads the checkpoint with
``--quantization quads_nvfp4`` must report too. ``--global-scale-rule te`` makes a trainer that
scales in another way than the engine: a check of fingerprints must fail on it.
"""

import argparse
import copy
import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from quads_common.qat import fingerprints, prepare_qat, unprepare

MODEL = Path(__file__).parent / "models" / "arith-moe"
sys.path.insert(0, str(MODEL))

from arith_model import PAD_ID, save_checkpoint, zero_hot_columns  # noqa: E402  (lies in MODEL)
from batches import encode  # noqa: E402
from problems import (  # noqa: E402
    GROUP_SHARES,
    OPERAND_RANGES,
    OPERATORS,
    Problem,
    format_answer,
    format_prompt,
    heldout,
    is_heldout,
)

WARMUP_STEPS = 10
HELDOUT_COUNT = 1000
HELDOUT_SEED = 3_000_000


def draw(count: int, rng: random.Random) -> list[Problem]:
    """Return random problems that are not held out."""
    groups, shares = list(GROUP_SHARES), list(GROUP_SHARES.values())
    found: list[Problem] = []
    while len(found) < count:
        a, b = (rng.choice(OPERAND_RANGES[d]) for d in rng.choices(groups, shares)[0])
        op = rng.choice(OPERATORS)
        if not is_heldout(a, op, b):
            found.append((format_prompt(a, op, b), format_answer(a, op, b)))
    return found


def logits_of(model: nn.Module, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Return FP32 logits under BF16 autocast, and the labels (PAD outside of answers)."""
    inputs, labels = (part.long().to(model.device) for part in encode(problems))
    with torch.autocast(model.device.type, torch.bfloat16):
        logits = model(input_ids=inputs, use_cache=False).logits
    return logits.float(), labels


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Return the share of held-out problems whose every answer token is the most probable one."""
    logits, labels = logits_of(model, heldout(HELDOUT_COUNT, HELDOUT_SEED))
    right = (logits.argmax(-1) == labels) | (labels == PAD_ID)
    return right.all(1).float().mean().item()


def save(model: nn.Module, folder: Path) -> None:
    """Write a BF16 checkpoint and the fingerprints of what the trainer computes with."""
    save_checkpoint(unprepare(copy.deepcopy(model)), folder)
    (folder / "fingerprints.json").write_text(json.dumps(fingerprints(model), indent=1) + "\n")


def finetune(model: nn.Module, args: argparse.Namespace) -> None:
    """Take ``args.steps`` steps; save before the first and after every ``args.save_every``-th."""
    rng = random.Random(args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    save(model, args.out / "step-000")
    started = time.monotonic()
    for step in range(1, args.steps + 1):
        logits, labels = logits_of(model, draw(args.batch, rng))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(step / WARMUP_STEPS, 1 - (step - 1) / args.steps)
        optimizer.step()
        zero_hot_columns(model)
        if step % args.save_every == 0 or step == args.steps:
            save(model, args.out / f"step-{step:03d}")
            seconds = time.monotonic() - started
            print(f"{seconds:6.1f} s  step {step:4d}  loss {loss.item():.4f}", flush=True)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=MODEL)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--global-scale-rule", choices=("pow2", "te"), default="pow2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Fine-tune, and print held-out accuracies with BF16 and with NVFP4 weights (W4A16)."""
    args = parse_args()
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(
        args.checkpoint, dtype=torch.float32, experts_implementation="eager"
    ).to(args.device)
    print(f"before: BF16 {accuracy(model):.2%}", end="  ")
    prepare_qat(model, {"global_scale_rule": args.global_scale_rule})
    print(f"W4A16 {accuracy(model):.2%}", flush=True)
    finetune(model, args)
    quantized = accuracy(model)
    print(f"after:  BF16 {accuracy(unprepare(model)):.2%}  W4A16 {quantized:.2%}")


if __name__ == "__main__":
    main()
