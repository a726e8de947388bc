"""The task of the GRPO examples: a model that forgot some arithmetic, problems and a reward."""

import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

MODEL = Path(__file__).parent / "models" / "arith-moe"
sys.path.insert(0, str(MODEL))

from problems import OPERAND_RANGES, OPERATORS, format_answer, format_prompt, is_heldout  # noqa: E402


def forgetful_model(path: str, noise: float) -> PreTrainedModel:
    """Load the model in FP32 and let it forget a part of what it knows, so that it can learn.

    noise: standard deviation of what is added to each weight, relative to the tensor's own.
    """
    # A loop over the experts runs on every device, also with FP32 weights under autocast.
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * p.std() * noise)
    return model


def draw_problems(count: int, seed: int) -> list[tuple[str, str]]:
    """Return ``count`` problems of three digits, (prompt, answer), that are not held out."""
    rng, found = random.Random(seed), []
    while len(found) < count:
        a, b = rng.choice(OPERAND_RANGES[3]), rng.choice(OPERAND_RANGES[3])
        op = rng.choice(OPERATORS)
        if not is_heldout(a, op, b):
            found.append((format_prompt(a, op, b), format_answer(a, op, b)))
    return found


def reward(completion: str, answer: str) -> float:
    """Return 1 for the right answer; else up to one half, by the characters that are right."""
    if completion == answer:
        return 1.0
    right = sum(x == y for x, y in zip(completion, answer, strict=False))
    return 0.5 * right / max(len(completion), len(answer))
