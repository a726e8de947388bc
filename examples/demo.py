"""Serve a small model through ``--quantization quads_nvfp4`` and compare it with its BF16 original.

    make demo        or        python examples/demo.py [--model DIR] [-- OPTIONS OF vllm serve]

It starts a real ``vllm serve``, computes the BF16 answers with transformers meanwhile, asks the
server the same questions over the OpenAI API, prints both beside the right ones, then what was
quantized, and stops the server.
"""

import argparse
import re
import signal
import sys
from collections.abc import Iterable
from pathlib import Path

from serving import ServerError, serve

MODEL = Path(__file__).resolve().parent / "models" / "arith-moe"
# None of them was in the model's training.
QUESTIONS = ["347+589=", "905-268=", "974+360=", "69+61=", "682-801=", "773+256="]
MAX_TOKENS = 8
SERVE_OPTIONS = ["--quantization", "quads_nvfp4", "--enforce-eager"]
SERVE_OPTIONS += ["--max-model-len", "256", "--max-num-seqs", "8"]


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a BF16 checkpoint")
    parser.add_argument("serve_options", nargs="*", help="after --: more options of vllm serve")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_exit)
    try:
        run(arguments.model, SERVE_OPTIONS + arguments.serve_options)
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def raise_exit(number: int, _frame: object) -> None:
    """Handle a signal by leaving through every ``finally``."""
    sys.exit(128 + number)


def run(model: Path, options: list[str]) -> None:
    """Serve the model, ask, compare and report."""
    if not (model / "config.json").is_file():
        raise ServerError(f"{model} holds no config.json; --model wants a checkpoint's folder")
    with serve(model, options) as server:
        with server.progress():
            reference = bf16_answers(model)
            server.wait_until_ready()
            answers = [first_line(server.complete(q, MAX_TOKENS)) for q in QUESTIONS]
            report = server.report()
        rows = zip(QUESTIONS, map(right_answer, QUESTIONS), reference, answers, strict=True)
        print_table(("question", "right", "BF16", "quads_nvfp4"), rows)
        print_table(("what was served", ""), report_rows(report))
    print("\nThe server is stopped.")


def bf16_answers(model: Path) -> list[str]:
    """Answer the questions with transformers and the checkpoint as it is."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    answers = []
    for question in QUESTIONS:
        inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
        output = network.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        new = output[0, inputs["input_ids"].shape[1] :]
        answers.append(first_line(tokenizer.decode(new, skip_special_tokens=True)))
    return answers


def first_line(text: str) -> str:
    """Return the answer in a completion."""
    return text.strip().partition("\n")[0]


def right_answer(question: str) -> str:
    """Compute ``a+b=`` or ``a-b=``."""
    a, operator, b = re.fullmatch(r"(\d+)([+-])(\d+)=", question).groups()
    return str(int(a) + int(b) if operator == "+" else int(a) - int(b))


def report_rows(workers: list[dict]) -> list[tuple[str, str]]:
    """Lay out the workers' reports; bytes are summed, everything else is the same in each."""
    first = workers[0]
    before, after = (sum(w[key] for w in workers) for key in ("bytes_before", "bytes_after"))
    return [
        ("method", first["method"]),
        ("activations", first["act"]),
        ("backend", first["backend"]),
        ("layers quantized", str(first["layers_quantized"])),
        ("layers kept", str(first["layers_kept"])),
        ("bytes before", f"{before:,}"),
        ("bytes after", f"{after:,}"),
    ]


def print_table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """Print rows of text in aligned columns under a header."""
    rows = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    print()
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


if __name__ == "__main__":
    sys.exit(main())
