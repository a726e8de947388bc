"""Weight syncs into a vLLM engine on a GPU: CUDA graphs, sleep mode, memory, time.

    python tests/gpu/check_sync.py OUT_FOLDER [--only "time quads" "time bf16"]

Needs vLLM, this package with its entry points, and one GPU. Every engine runs in a process of its
own. Prints one line per check and ends with FAILED or ok.

1. arith-moe with CUDA graphs (no Inductor, so that eager runs the same kernels): after syncs by
   every path, with the freed memory overwritten, tokens and log-probs equal those of a fresh eager
   engine; fingerprints equal the shared quantizer's; returned expert ids are the kernel's.
2. Sleep level 2, wake, sync. Memory over 10 syncs.
3. Eight layers of Qwen3-30B-A3B's shape: time of a sync beside one into unquantized BF16 vLLM.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from sync_engine import (
    EXPERTS,
    GRAPHS,
    HIDDEN,
    INNER,
    MODEL,
    PROMPTS,
    big_config,
    big_weights,
    engine,
    expected_prints,
    outputs,
    overwrite_free_memory,
    prints,
    second_weights,
    sync,
    worker_of,
)


def part_graphs() -> dict[str, Any]:
    """CUDA graphs captured before the syncs."""
    from safetensors.torch import load_file

    llm = engine(MODEL, quantization="quads_nvfp4", compilation_config=GRAPHS)
    first = {k: v.cuda() for k, v in load_file(MODEL / "model.safetensors").items()}
    second = second_weights()
    results: dict[str, Any] = {"report": llm.collective_rpc("quads_report")[0]}
    results["W1"] = outputs(llm)
    for path in ("reload", "start/finish", "bucket", "one by one"):
        sync(llm, second, path)
        overwrite_free_memory()
        results[f"W2 {path}"] = outputs(llm)
        results[f"prints {path}"] = prints(llm) == expected_prints(second)
        sync(llm, first, path)
        overwrite_free_memory()
        results[f"W1 {path}"] = outputs(llm)
    allocated = []
    for i in range(10):
        sync(llm, second if i % 2 else first, "one by one")
        torch.cuda.synchronize()
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    results["allocated"] = allocated
    return results


def part_sleep() -> dict[str, Any]:
    """Sleep level 1 and 2 with CUDA graphs; a run without a sync must raise."""
    llm = engine(
        MODEL, quantization="quads_nvfp4", compilation_config=GRAPHS, enable_sleep_mode=True
    )
    results: dict[str, Any] = {"before": outputs(llm)}
    llm.sleep(level=1)
    llm.wake_up()
    results["level 1"] = outputs(llm)
    second = second_weights()
    llm.sleep(level=2)
    overwrite_free_memory()
    llm.wake_up(tags=["weights"])
    sync(llm, second, "one by one")
    llm.wake_up(tags=["kv_cache"])
    results["level 2, W2"] = outputs(llm)
    results["prints"] = prints(llm) == expected_prints(second)
    llm.sleep(level=2)
    llm.wake_up()
    try:
        outputs(llm)
        results["not synced"] = "it ran"
    except Exception as error:
        results["not synced"] = f"{type(error).__name__}: {error}"
    return results


def part_eager(which: str) -> dict[str, Any]:
    """A fresh eager engine on the first or the second weights, from disk."""
    model = MODEL
    if which == "second":
        import shutil

        from safetensors.torch import save_file

        model = Path("/tmp/arith-moe-second")
        shutil.copytree(MODEL, model, dirs_exist_ok=True)
        tensors = {k: v.cpu() for k, v in second_weights().items()}
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    llm = engine(model, quantization="quads_nvfp4", enforce_eager=True)
    return {"outputs": outputs(llm)}


def part_routed() -> dict[str, Any]:
    """Expert ids that the engine returns, and those our kernel was called with."""
    from vllm import SamplingParams

    from vllm_quads.fused_moe import QuadsMoEMethod

    seen: dict[str, list[Any]] = {}
    plain = QuadsMoEMethod.apply

    def recording(method, layer, x, topk_weights, topk_ids, *args, **kwargs):
        seen.setdefault(method.prefix, []).append(topk_ids.cpu())
        return plain(method, layer, x, topk_weights, topk_ids, *args, **kwargs)

    QuadsMoEMethod.apply = recording
    llm = engine(
        MODEL, quantization="quads_nvfp4", enforce_eager=True, enable_return_routed_experts=True
    )
    seen.clear()
    params = SamplingParams(temperature=0.0, max_tokens=1)
    (result,) = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    returned = torch.as_tensor(result.outputs[0].routed_experts).long()
    ours = torch.stack([seen[k][0] for k in sorted(seen)], dim=1).long()
    tokens = min(len(returned), len(ours))
    same = torch.equal(returned[:tokens].sort(-1).values, ours[:tokens].sort(-1).values)
    return {"shape": list(returned.shape), "tokens": tokens, "equal": same}


def part_time(quantization: str) -> dict[str, Any]:
    """Seconds of raw ``load_weights`` of all layers, tensors already on the GPU; memory."""
    llm = engine(
        big_config(Path(f"/tmp/big-{quantization}")),
        load_format="dummy",
        quantization=None if quantization == "none" else quantization,
        enforce_eager=True,
        gpu_memory_utilization=0.4,
    )
    model = worker_of(llm).model_runner.get_model()
    items = big_weights()
    seconds, allocated, peak = [], [], []
    for _ in range(10):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        model.load_weights(items)
        llm.reset_prefix_cache()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        peak.append(torch.cuda.max_memory_allocated() - before)
        allocated.append(torch.cuda.memory_allocated())
    gigabytes = sum(t.nbytes for _, t in items) / 1e9
    return {"seconds": seconds, "allocated": allocated, "peak": peak, "gigabytes": gigabytes}


PARTS = {
    "graphs": part_graphs,
    "sleep": part_sleep,
    "routed": part_routed,
    "eager first": lambda: part_eager("first"),
    "eager second": lambda: part_eager("second"),
    "time quads": lambda: part_time("quads_nvfp4"),
    "time bf16": lambda: part_time("none"),
}
TOGETHER = (
    ("graphs", "eager first", "eager second"),
    ("sleep", "routed"),
    ("time quads",),
    ("time bf16",),
)


def run_together(
    script: str, groups: Iterable[tuple[str, ...]], out: Path, wanted: list[str]
) -> dict[str, Any]:
    """Each wanted part of a script in its own process, those of a group beside each other.

    Returns their results by name, and prints the log of those that fail.
    """
    results: dict[str, Any] = {}
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for group in groups:
        running = {}
        for name in (n for n in group if n in wanted):
            log = (out / f"{name.replace(' ', '_')}.log").open("w")
            command = [sys.executable, script, str(out), "--part", name]
            running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        for name, process in running.items():
            stem = out / name.replace(" ", "_")
            if process.wait() == 0:
                results[name] = json.loads(stem.with_suffix(".json").read_text())
            else:
                log_end = stem.with_suffix(".log").read_text()[-1500:]
                print(f"FAIL {name}: exit {process.returncode}\n{log_end}", flush=True)
    return results


def checks(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(what, holds, figures) of everything the results allow to check."""
    found = []
    if {"graphs", "eager first", "eager second"} <= results.keys():
        graphs = results["graphs"]
        expected = {
            f"W{i}": results[f"eager {n}"]["outputs"] for i, n in ((1, "first"), (2, "second"))
        }
        for key, value in graphs.items():
            if key[:2] in expected:
                found.append((f"graphs {key} = fresh eager engine", value == expected[key[:2]], ""))
            elif key.startswith("prints"):
                found.append((f"graphs {key}", value, ""))
        found.append(("W1 and W2 differ", expected["W1"] != expected["W2"], ""))
        flat = graphs["allocated"]
        found.append(("memory flat over 10 syncs", len(set(flat[1:])) == 1, str(flat[-1])))
        found.append(("backend triton", graphs["report"]["backend"] == "triton", ""))
        if "sleep" in results:
            sleep = results["sleep"]
            found.append(("sleep level 1", sleep["level 1"] == expected["W1"], ""))
            found.append(("sleep level 2, sync", sleep["level 2, W2"] == expected["W2"], ""))
            found.append(("fingerprints after level 2", sleep["prints"], ""))
            message = sleep["not synced"]
            found.append(("level 2 without a sync raises", "WeightsLost" in message, message[:90]))
    if "routed" in results:
        found.append(("routed experts", results["routed"]["equal"], str(results["routed"])))
    if {"time quads", "time bf16"} <= results.keys():
        quads, bf16 = results["time quads"], results["time bf16"]
        times = [statistics.median(r["seconds"][1:]) for r in (quads, bf16)]
        figures = (
            f"{times[0] * 1e3:.0f} ms, BF16 {times[1] * 1e3:.0f} ms, {quads['gigabytes']:.1f} GB"
        )
        ratio = times[0] / times[1]
        found.append(
            (f"sync takes {ratio:.2f} of BF16's time (at most 1.5)", ratio <= 1.5, figures)
        )
        layer = EXPERTS * 3 * HIDDEN * INNER * 2
        share = max(quads["peak"][1:]) / layer
        found.append((f"peak {share:.3f} of a layer in BF16 (at most 1.3)", share <= 1.3, ""))
        flat = len(set(quads["allocated"][1:])) == 1
        found.append(("memory flat, big model", flat, str(quads["allocated"][-1])))
    return found


def main() -> None:
    """Run everything, or one part."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if "--part" in sys.argv:
        name = sys.argv[-1]
        result = PARTS[name]()
        (out / f"{name.replace(' ', '_')}.json").write_text(json.dumps(result))
        return
    wanted = sys.argv[sys.argv.index("--only") + 1 :] if "--only" in sys.argv else list(PARTS)
    results = run_together(__file__, TOGETHER, out, wanted)
    found = checks(results)
    for what, holds, figures in found:
        print(f"{'ok  ' if holds else 'FAIL'} {what} {figures}")
    good = all(holds for _, holds, _ in found) and len(results) == len(wanted)
    print("ok" if good else "FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
