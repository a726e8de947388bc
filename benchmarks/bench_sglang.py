"""How fast does SGLang decode with quads_nvfp4, beside BF16 and SGLang's online FP8?

    python benchmarks/bench_sglang.py OUT_FOLDER
    python benchmarks/bench_sglang.py OUT_FOLDER --modes bf16,w4a16 --sequences 32

A model of Qwen3-30B-A3B's layer shapes (8 layers, 128 experts, top-8; its vocabulary cut to 8192,
because the head of a 48-layer model would dominate 8 layers), dummy weights, decode CUDA graphs,
SGLang's Triton backends for attention and experts in every mode. Needs SGLang, this package
installed, and one GPU. Every engine is a process, one after another.

"step": milliseconds of a decode step, from the difference of two runs that differ in their output
length only, median of ``--repeats``; "x bf16": decode throughput over BF16's. Tokens are drawn at
random: with dummy weights all are about as likely, so in every mode the batch is as varied, and
calls as many experts. (The most likely tokens differ with the rounding of each mode; then some
batches repeat themselves.) Compensated modes gather statistics as by default, one of 64 tokens.
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.turns import Turns, ended, step_times, turns_environment  # noqa: E402

PROMPT_TOKENS, VOCABULARY = 32, 8192
MODES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"quantization": "fp8"},
    "w4a16": {"quantization": "quads_nvfp4", "act": "bf16"},
    "nvfp4": {"quantization": "quads_nvfp4", "act": "nvfp4"},
    "quads": {"quantization": "quads_nvfp4", "method": "quads"},
    "quads_splice": {"quantization": "quads_nvfp4", "method": "quads_splice"},
    "foursight": {"quantization": "quads_nvfp4", "method": "foursight"},
}
USUAL = ("bf16", "fp8", "w4a16", "nvfp4", "quads")
OPTIONS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.8,
    "max_total_tokens": 65536,  # small: engines may share the GPU
    "context_length": 1024,
    "random_seed": 0,
}


def write_model(folder: Path, layers: int) -> Path:
    """Configuration only; no weights, no tokenizer."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, max_position_embeddings=40960, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16",
    )  # fmt: skip
    config.save_pretrained(folder)
    return folder


def generate(llm: Any, sequences: int, tokens: int) -> float:
    """Seconds of ``tokens`` output tokens for each of ``sequences`` prompts."""
    prompts = [
        [(7 * i + 13 * j) % (VOCABULARY - 10) + 5 for j in range(PROMPT_TOKENS)]
        for i in range(sequences)
    ]
    params = {"temperature": 1, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    llm.generate(input_ids=prompts, sampling_params=params)
    return time.perf_counter() - start


def run_mode(mode: str, folder: Path, sequences: list[int], repeats: int) -> dict[str, Any]:
    """One engine: steps by number of sequences."""
    import sglang

    options = dict(MODES[mode])
    if options.get("quantization") == "quads_nvfp4":
        section = {"act": options.pop("act", "nvfp4"), "method": options.pop("method", "nvfp4")}
        options["json_model_override_args"] = json.dumps({"quantization_config": section})
    llm = sglang.Engine(
        model_path=str(folder), cuda_graph_max_bs_decode=max(sequences),
        port=31000 + 1500 * list(MODES).index(mode),  # others are searched above it
        **OPTIONS, **options,
    )  # fmt: skip
    result: dict[str, Any] = {"version": sglang.__version__}
    turns = Turns(f"sglang {mode}")
    times = step_times(functools.partial(generate, llm), turns, sequences, repeats)
    result |= {str(count): statistics.median(found) for count, found in times.items()}
    result["turns"] = times
    turns.stay()
    if options.get("quantization") == "quads_nvfp4":
        from sglang_quads import client

        result["report"] = client.report(llm)[0]
    llm.shutdown()
    return result


def run_all(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every mode in a process of its own; what fails shows the end of its log."""
    environment = dict(os.environ)
    if arguments.together:
        environment |= turns_environment(out / "turns", len(arguments.modes))

    def run(mode: str) -> int:
        command = [sys.executable, __file__, str(out), "--part", mode, *sys.argv[2:]]
        with (out / f"{mode}.log").open("w") as sink:
            code = subprocess.run(
                command, stdout=sink, stderr=sink, env=environment, start_new_session=True
            ).returncode
        ended(environment, f"sglang {mode}")
        return code

    results: dict[str, Any] = {}
    with ThreadPoolExecutor(len(arguments.modes) if arguments.together else 1) as pool:
        for mode, code in zip(arguments.modes, pool.map(run, arguments.modes), strict=True):
            result = out / f"{mode}.json"
            if code == 0 and result.exists():
                results[mode] = json.loads(result.read_text())
            else:
                log = (out / f"{mode}.log").read_text()
                print(f"FAIL {mode}: exit {code}\n{log[-2500:]}", flush=True)
    return results


def show(results: dict[str, Any], sequences: list[int]) -> None:
    """The table."""
    import torch

    versions = {r["version"] for r in results.values()}
    print(f"{torch.cuda.get_device_name()}, SGLang {versions}, torch {torch.__version__}")
    print(f"{'mode':12}" + "".join(f"{f'step, {n} seq.':>16}{'x bf16':>9}" for n in sequences))
    for mode, result in results.items():
        cells = ""
        for count in map(str, sequences):
            base = results.get("bf16", {}).get(count)
            ratio = f"{base / result[count]:9.2f}" if base else f"{'':9}"
            cells += f"{result[count]:13.3f} ms{ratio}"
        print(f"{mode:12}{cells}")
    for mode, result in results.items():
        for count, turns in result["turns"].items():
            print(f"turns of {mode}, {count} seq.: " + ", ".join(f"{t:.3f}" for t in turns))
        if "report" in result:
            print(f"{mode}: {result['report']}")


def main() -> None:
    """Run all modes, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--modes", type=lambda text: text.split(","), default=list(USUAL), help=", ".join(MODES)
    )
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--together", action="store_true", help="see turns.py")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = arguments.out / "model"
    if arguments.part:
        result = run_mode(arguments.part, folder, arguments.sequences, arguments.repeats)
        (arguments.out / f"{arguments.part}.json").write_text(json.dumps(result))
        return
    write_model(folder, arguments.layers)
    results = run_all(arguments.out, arguments)
    if results:
        show(results, arguments.sequences)
    sys.exit(len(results) != len(arguments.modes))


if __name__ == "__main__":
    main()
