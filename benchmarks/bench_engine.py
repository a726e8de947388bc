"""Does an engine decode faster with quads_nvfp4 than with vLLM's online FP8?

    python benchmarks/bench_engine.py OUT_FOLDER
    python benchmarks/bench_engine.py OUT_FOLDER --modes fp8_per_block,quads --sequences 32

A model of Qwen3-30B-A3B's shape (48 layers, 128 experts, top-8), dummy weights, torch.compile as
vLLM sets it, CUDA graphs of exactly the batches that are timed, experts chosen uniformly at random
in every engine (vLLM's routing simulator: dummy weights would send all tokens to the same few).
Needs vLLM, this package with its entry points, and one GPU; with several, one engine runs on each.
Every engine is a process. ``--together``: all start at once on one GPU and are timed in turns.

"step": milliseconds between the ends of two steps in which all sequences decode, the median of all
in ``--repeats`` turns, and their mean, which stalls raise; the longest are listed. "busy": kernel
time of a decode step, from torch's profiler, as a share of the median; "tokens/s" and "/fp8", over
the fastest FP8 mode's, are of the mean. Below, every turn: its median and the kernels of its steps.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.turns import Turns, ended, turns_environment  # noqa: E402

TOKENIZER = ROOT / "examples/models/arith-moe"
PROMPT_TOKENS = 32
DECODED, SKIPPED = 96, 8  # output tokens of a run, and steps at either end that are not timed
PROFILED = 4, 12  # output tokens of two runs under the profiler
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8_per_tensor": {"quantization": "fp8_per_tensor"},
    "fp8_per_block": {"quantization": "fp8_per_block"},
    "w4a16": {"act": "bf16", "method": "nvfp4"},
    "nvfp4": {"method": "nvfp4"},
    "quads": {"method": "quads"},
    "quads_splice": {"method": "quads_splice"},
    "foursight": {"method": "foursight"},
}


def write_model(folder: Path, layers: int) -> Path:
    """Configuration of Qwen3-30B-A3B and a tokenizer; no weights."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
        decoder_sparse_step=1, max_position_embeddings=40960, tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((TOKENIZER / name).read_text())
    return folder


def run_steps(llm: Any, sequences: int, tokens: int) -> list[float]:
    """Milliseconds between the ends of the engine's steps, with as many prompts at once."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for i in range(sequences):
        prompt = {"prompt_token_ids": [(7 * i + j) % 90 + 5 for j in range(PROMPT_TOKENS)]}
        engine.add_request(str(i), prompt, params)
    ends = []
    while engine.has_unfinished_requests():
        engine.step()
        ends.append(time.perf_counter())
    return [(end - start) * 1e3 for start, end in itertools.pairwise(ends)]


def decode_steps(llm: Any, sequences: int) -> list[float]:
    """Those of ``run_steps`` in which every sequence decodes; all were prefilled in one step."""
    run_steps(llm, sequences, 2 * SKIPPED)  # warms up
    return run_steps(llm, sequences, DECODED)[SKIPPED:-SKIPPED]


def kernels(llm: Any, sequences: int) -> dict[str, float]:
    """Milliseconds per decode step of the kernels that take longest, and of all together."""
    from torch.profiler import ProfilerActivity, profile

    totals = []
    for tokens in PROFILED:
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            run_steps(llm, sequences, tokens)
        totals.append({e.key[:60]: e.self_device_time_total for e in profiler.key_averages()})
    per_step = {
        k: (t - totals[0].get(k, 0.0)) / (PROFILED[1] - PROFILED[0]) / 1e3
        for k, t in totals[1].items()
    }
    top = sorted(per_step, key=lambda k: -per_step[k])[:24]
    return {"all": sum(per_step.values()), **{k: per_step[k] for k in top}}


def run_mode(mode: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine: steps by number of sequences."""
    from vllm import LLM

    options = dict(OPTIONS[mode])
    if "method" in options:
        options = {"quantization": "quads_nvfp4", "additional_config": {"quads": options}}
    llm = LLM(
        str(folder), load_format="dummy", dtype="bfloat16", max_model_len=512, seed=0,
        max_num_seqs=max(arguments.sequences), max_num_batched_tokens=8192,
        compilation_config={"cudagraph_capture_sizes": arguments.sequences},
        enable_prefix_caching=False, kv_cache_memory_bytes=4 << 30, disable_log_stats=True,
        gpu_memory_utilization=0.1,  # only asked for at the start, as the cache's size is given
        **options,
    )  # fmt: skip
    turns, counts = Turns(mode), arguments.sequences
    result: dict[str, Any] = {str(count): {"steps": [], "kernels": []} for count in counts}
    for _ in range(arguments.repeats):
        with turns.turn():
            for count in counts:
                result[str(count)]["steps"].append(decode_steps(llm, count))
                result[str(count)]["kernels"].append(kernels(llm, count))
    turns.stay()
    if OPTIONS[mode].get("method", "nvfp4") != "nvfp4":
        result["sampled"] = least_sampled(llm)
    return result


def least_sampled(llm: Any) -> float:
    """Of w13's inputs, the smallest share of the tokens that was counted: one of 64 is sampled."""
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    compensator = worker.vllm_config.quant_config.runtime.compensator
    compensator.count_staged()
    found = [s.statistics for s in compensator.states if s.site.kind == "w13"]
    return min(float(stats.count.sum()) / float(stats.offered) for stats in found)


def run_all(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Every mode in a process, one per GPU at a time or all; what fails shows its log's end."""
    import torch

    together, waiting = arguments.together, list(arguments.modes)
    turns = turns_environment(out / "turns", len(waiting)) if together else {}
    places = range(len(waiting) if together else torch.cuda.device_count())
    running: dict[int, tuple[str, subprocess.Popen]] = {}
    results: dict[str, Any] = {}
    while waiting or running:
        for place in places:
            if place not in running and waiting:
                mode = waiting.pop(0)
                log = (out / f"{mode}.log").open("w")
                environment = {
                    **os.environ, **turns, "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
                }  # fmt: skip
                if not together:
                    environment["CUDA_VISIBLE_DEVICES"] = str(place)
                command = [sys.executable, __file__, str(out), "--part", mode, *sys.argv[2:]]
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
                running[place] = (mode, process)
        time.sleep(0.2)
        for place, (mode, process) in list(running.items()):
            if process.poll() is not None:
                del running[place]
                ended({**os.environ, **turns}, mode)
                if process.returncode == 0:
                    results[mode] = json.loads((out / f"{mode}.json").read_text())
                else:
                    print(f"FAIL {mode}\n{(out / f'{mode}.log').read_text()[-1500:]}", flush=True)
    return {mode: results[mode] for mode in arguments.modes if mode in results}


def show(results: dict[str, Any], sequences: list[int]) -> None:
    """The table, every turn in it, and the kernels that take longest."""
    for count in map(str, sequences):
        steps = {mode: list(itertools.chain(*r[count]["steps"])) for mode, r in results.items()}
        means = {mode: statistics.fmean(found) for mode, found in steps.items()}
        fp8 = min((s for m, s in means.items() if m.startswith("fp8")), default=float("nan"))
        print(f"\n{count} sequences: step ms, mean, tokens/s, /fp8, busy")
        for mode, mean in means.items():
            median = statistics.median(steps[mode])
            busy = statistics.median(k["all"] for k in results[mode][count]["kernels"]) / median
            print(
                f"{mode:16s} {median:7.3f} {mean:7.3f} {int(count) / mean * 1e3:9.0f} "
                f"{fp8 / mean:5.2f} {busy:5.0%}"
            )
        for mode, result in results.items():
            found = result[count]
            medians = [statistics.median(turn) for turn in found["steps"]]
            turns = zip(medians, (k["all"] for k in found["kernels"]), strict=True)
            print(f"{mode}: " + ", ".join(f"{m:.2f} (kernels {k:.2f})" for m, k in turns))
            longest = sorted(steps[mode])[:-9:-1]
            print(f"{mode}: longest " + ", ".join(f"{step:.1f}" for step in longest))
            for name in list(found["kernels"][-1])[1:15]:
                each = ", ".join(f"{k.get(name, math.nan):.3f}" for k in found["kernels"])
                print(f"{mode}: {each} {name}")
    for mode, result in results.items():
        if "sampled" in result:
            print(f"{mode}: counted at least 1 of {1 / max(result['sampled'], 1e-9):.1f} tokens")


def main() -> None:
    """Run every mode, or the one that ``--part`` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(OPTIONS))
    parser.add_argument(
        "--sequences", type=lambda s: [int(n) for n in s.split(",")], default=[32, 256]
    )
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--together", action="store_true", help="see turns.py")
    parser.add_argument("--part", choices=OPTIONS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.modes) - set(OPTIONS))
    if unknown:
        parser.error(f"unknown modes {unknown}; known: {', '.join(OPTIONS)}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    folder = arguments.out / "model"
    if arguments.part:
        result = run_mode(arguments.part, folder, arguments)
        (arguments.out / f"{arguments.part}.json").write_text(json.dumps(result))
        return
    folder.mkdir(exist_ok=True)
    write_model(folder, arguments.layers)
    results = run_all(arguments.out, arguments)
    show(results, arguments.sequences)
    sys.exit(len(results) != len(arguments.modes))


if __name__ == "__main__":
    main()
