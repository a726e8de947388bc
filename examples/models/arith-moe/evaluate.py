"""Greedy exact-match accuracy of a saved arith-moe checkpoint on held-out problems, in BF16."""

import argparse
from collections import defaultdict
from pathlib import Path

import torch
from problems import Problem, heldout
from transformers import AutoModelForCausalLM, AutoTokenizer

LONGEST_COMPLETION = 6  # "1998" or "-989" and </s>, and one token to show an answer that runs on
EVAL_SEED = 2_000_000


@torch.inference_mode()
def wrong_completions(
    checkpoint: Path, problems: list[Problem], device: str
) -> list[tuple[str, str, str]]:
    """Return (prompt, answer, completion) of each problem the checkpoint gets wrong."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    # The eager experts are the reference: no grouped kernel that depends on the machine.
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, experts_implementation="eager"
    )
    model.to(device).eval()
    by_length: dict[int, list[Problem]] = defaultdict(list)
    for problem in problems:
        by_length[len(problem[0])].append(problem)
    wrong = []
    for group in by_length.values():
        prompts = tokenizer([prompt for prompt, _ in group], return_tensors="pt").to(device)
        output = model.generate(
            input_ids=prompts["input_ids"],
            attention_mask=prompts["attention_mask"],
            do_sample=False,
            max_new_tokens=LONGEST_COMPLETION,
        )
        completions = tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1] :])
        for (prompt, answer), completion in zip(group, completions, strict=True):
            # A right answer that does not stop is wrong: engines rely on </s>.
            if completion.replace("<pad>", "") != f"{answer}</s>":
                wrong.append((prompt, answer, completion))
    return wrong


def report_accuracy(checkpoint: Path, problems: list[Problem], device: str) -> float:
    """Print and return the exact-match accuracy, with a few of the errors."""
    wrong = wrong_completions(checkpoint, problems, device)
    accuracy = 1 - len(wrong) / len(problems)
    print(f"BF16 greedy accuracy on {len(problems)} held-out problems: {accuracy:.2%}")
    for prompt, answer, completion in wrong[:5]:
        print(f"  wrong: {prompt} gave {completion!r}, expected {answer!r}")
    return accuracy


def main() -> None:
    """Evaluate the checkpoint named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    report_accuracy(args.checkpoint, heldout(args.count, EVAL_SEED), args.device)


if __name__ == "__main__":
    main()
