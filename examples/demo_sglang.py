"""Serve a small model through SGLang with ``quads_nvfp4`` and compare it with its BF16 original.

    make demo-sglang        or        python examples/demo_sglang.py [--model DIR] [-- OPTIONS]

It starts a real ``python -m sglang.launch_server`` on the CPU, computes the BF16 answers with
transformers meanwhile, asks the server the same questions over the OpenAI API, prints both beside
the right ones, then what was quantized, and stops the server. OPTIONS are more of the server's.
"""

import argparse
import re
import signal
import sys
from pathlib import Path

from demo import (
    MAX_TOKENS,
    MODEL,
    QUESTIONS,
    bf16_answers,
    first_line,
    print_table,
    raise_exit,
    report_rows,
    right_answer,
)
from serving import Server, ServerError, run, tail

# What SGLang needs on a CPU without its own kernels; nothing of it applies to a GPU.
CPU_OPTIONS = ["--device", "cpu", "--attention-backend", "torch_native"]
CPU_OPTIONS += ["--sampling-backend", "pytorch", "--grammar-backend", "none"]
CPU_OPTIONS += ["--disable-overlap-schedule", "--skip-server-warmup"]
CPU_OPTIONS += ["--mem-fraction-static", "0.2", "--max-total-tokens", "4096"]
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


class SGLangServer(Server):
    """A running ``sglang.launch_server``."""

    name = "sglang.launch_server"

    def last_message(self) -> str:
        """Return the last message of the log without its time."""
        for line in reversed(tail(self.log).splitlines()):
            if found := re.search(r"^\[\d{4}-\d\d-\d\d [\d:]+[^\]]*\] (?!server_args)(\S.*)", line):
                return found[1]
        return f"{self.name} is starting"

    def report(self) -> list[dict]:
        """Return what the plugin says of the loaded model, one dict for each rank."""
        from sglang_quads.client import decode

        action = "quads_report"
        return decode(action, self.ask("/weights_checker", {"action": action}))


def main() -> int:
    """Run the demo; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a BF16 checkpoint")
    parser.add_argument("serve_options", nargs="*", help="after --: more options of the server")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_exit)
    try:
        demonstrate(arguments.model, arguments.serve_options)
    except ServerError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def demonstrate(model: Path, options: list[str]) -> None:
    """Serve the model, ask, compare and report."""
    if not (model / "config.json").is_file():
        raise ServerError(f"{model} holds no config.json; --model wants a checkpoint's folder")
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    options = ["--quantization", "quads_nvfp4", *CPU_OPTIONS, *options]
    with run(command, options, ENVIRONMENT, SGLangServer) as server:
        with server.progress():
            reference = bf16_answers(model)
            server.wait_until_ready()
            answers = [first_line(server.complete(q, MAX_TOKENS)) for q in QUESTIONS]
            report = server.report()
        rows = zip(QUESTIONS, map(right_answer, QUESTIONS), reference, answers, strict=True)
        print_table(("question", "right", "BF16", "quads_nvfp4"), rows)
        print_table(("what was served", ""), report_rows(report))
    print("\nThe server is stopped.")


if __name__ == "__main__":
    sys.exit(main())
