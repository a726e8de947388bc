"""SGLang on a GPU: CUDA graphs, weight updates after capture, release and resume, memory.

    python tests/gpu/check_sglang.py OUT_FOLDER
    python tests/gpu/check_sglang.py OUT_FOLDER --jobs 4 --only graphs "eager first" "eager second"

Needs SGLang 0.5.15.post1, this package installed (SGLang finds plugins by their metadata), and one
GPU; nvcc and ninja for SGLang's own kernels. Every engine runs in a process of its own, on
arith-moe. Prints one line per check and ends with FAILED or ok.

1. "graphs": decode graphs captured before the updates. After updates to W2 and back by tensors,
   flattened buckets and from disk, with the freed memory overwritten, tokens and log-probs equal
   those of a fresh engine without graphs, bit for bit; fingerprints equal the torch quantizer's;
   addresses stay. A bad update is refused by name. Memory over 10 updates.
2. "default": SGLang's own choice of graphs (prefill too): the same tokens. 1 to 3 are compared with
   "eager first" and "eager second".
3. "release": memory saver; release all, resume weights, update, resume the rest.
4. "compensation": preset quads under decode graphs with the overlap scheduler. Five sequences in
   graphs of eight: every token is counted once, no padded row, and statistics are those of decoding
   without graphs. A refresh between replays takes effect without a capture: outputs change, equal
   those without graphs bit for bit, and a saved selection brings the first ones back; addresses
   stay; an update from disk refreshes.
5. "lost": running after a release without an update must end with WeightsLostError.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from sglang_engine import (
    HERE,
    MODEL,
    PORT_VARIABLE,
    PROMPTS,
    check,
    engine,
    expected_prints,
    flush,
    inside,
    outputs,
    second_checkpoint,
    second_weights,
    together,
    update,
)

# Prefill without graphs: padding would change the tiles, and so the order of summation.
DECODE_GRAPHS = {"disable_prefill_cuda_graph": True, "cuda_graph_max_bs_decode": 8}
QUADS = {
    "quantization": "quads_nvfp4",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 65536,
    "log_level": "info",
}
PATHS = ("tensor", "flattened", "disk")


def first_weights() -> dict[str, torch.Tensor]:
    """The committed checkpoint's."""
    from safetensors.torch import load_file

    return load_file(MODEL / "model.safetensors")


def part_graphs() -> dict[str, Any]:
    """Updates under captured decode graphs."""
    from sglang_quads import client

    first, second = first_weights(), second_weights()
    folders = {"W1": MODEL, "W2": second_checkpoint()}
    llm = engine(MODEL, **QUADS, **DECODE_GRAPHS)
    results: dict[str, Any] = {"report": client.report(llm)[0], "backends": inside(llm, "backends")}
    start = inside(llm, "addresses")
    results["W1 at start"] = outputs(llm)
    for path in PATHS:
        for name, weights in (("W2", second), ("W1", first)):
            update(llm, weights, path, folders[name])
            inside(llm, "overwrite_free_memory")
            results[f"{name} {path}"] = outputs(llm)
            same = client.fingerprints(llm) == expected_prints(weights)
            results[f"prints {name} {path}"] = same
    results["addresses"] = inside(llm, "addresses") == start
    results["bad"] = bad_update(llm, second)
    results["W1 after a bad update"] = outputs(llm)
    allocated = []
    for i in range(10):
        update(llm, first if i % 2 else second, "tensor", MODEL)
        allocated.append(inside(llm, "allocated"))
    results["allocated"] = allocated
    llm.shutdown()
    return results


def bad_update(llm: Any, weights: dict[str, torch.Tensor]) -> str:
    """What an update with a NaN says."""
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    bad = weights[name].clone().cuda()
    bad[1, 2] = float("nan")
    flush(llm)
    try:
        check(llm.update_weights_from_tensor([(name, bad)], flush_cache=False))
    except RuntimeError as error:
        return str(error)
    return "it was accepted"


def part_eager(which: str) -> dict[str, Any]:
    """A fresh engine without graphs on the first or the second weights."""
    model = MODEL if which == "first" else second_checkpoint()
    llm = engine(model, **QUADS, disable_cuda_graph=True)
    found = {"outputs": outputs(llm)}
    llm.shutdown()
    return found


def part_default() -> dict[str, Any]:
    """SGLang's own graphs, prefill included."""
    llm = engine(MODEL, **QUADS)
    results = {"W1": outputs(llm)}
    update(llm, second_weights(), "flattened", MODEL)
    results["W2"] = outputs(llm)
    llm.shutdown()
    return results


def part_release() -> dict[str, Any]:
    """Release everything, then weights, an update, and the rest."""
    from sglang_quads import client

    llm = engine(MODEL, **QUADS, **DECODE_GRAPHS, enable_memory_saver=True)
    second = second_weights()
    results: dict[str, Any] = {"before": outputs(llm)}
    flush(llm)
    llm.release_memory_occupation()
    llm.resume_memory_occupation(tags=["weights"])
    for start in range(0, len(second), 64):
        bucket = [(n, t.cuda()) for n, t in list(second.items())[start : start + 64]]
        check(llm.update_weights_from_tensor(bucket, flush_cache=False))
    llm.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
    flush(llm)
    results["W2"] = outputs(llm)
    results["prints"] = client.fingerprints(llm) == expected_prints(second)
    llm.shutdown()
    return results


def part_lost() -> dict[str, Any]:
    """Runs on released weights; SGLang ends with the scheduler, so this process does too."""
    llm = engine(MODEL, **QUADS, disable_cuda_graph=True, enable_memory_saver=True)
    outputs(llm)
    flush(llm)
    llm.release_memory_occupation()
    llm.resume_memory_occupation()
    outputs(llm)
    return {"ran": True}


def part_compensation() -> dict[str, Any]:
    """Statistics of padded graphs, and a refresh between two replays."""
    from sglang_quads import client

    options = {"method": "quads", "sampling_rate": 1, "min_tokens": 8}
    override = json.dumps({"quantization_config": options})
    # One sequence has a graph without padding, five have the one of eight.
    graphs = {"disable_prefill_cuda_graph": True, "cuda_graph_bs_decode": [1, 8]}
    llm = engine(MODEL, **QUADS, **graphs, json_model_override_args=override)
    results: dict[str, Any] = {"report": client.report(llm)[0]}
    results["captured"] = inside(llm, "statistics")
    start = inside(llm, "lists")
    results["every block"] = outputs(llm)
    with tempfile.TemporaryDirectory() as folder:
        client.save_selection(llm, f"{folder}/start")
        for name in ("graphs", "eager"):
            inside(llm, "statistics")
            if name == "eager":
                inside(llm, "graphs_off")
            tokens = together(llm, PROMPTS[:5], 4)  # what the model is sure of, in any batch
            results[f"counted, {name}"] = {"tokens": tokens, "sites": inside(llm, "statistics")}
        inside(llm, "graphs_on")
        together(llm, PROMPTS, 30)
        results["refreshed"] = client.refresh(llm)[0]
        results["half"] = outputs(llm)
        inside(llm, "graphs_off")
        results["half, eager"] = outputs(llm)
        inside(llm, "graphs_on")
        now = inside(llm, "lists")
        results["addresses"] = now["addresses"] == start["addresses"]
        results["blocks"] = [[sum(b >= 0 for b in x) for x in g] for g in now["blocks"].values()]
        client.load_selection(llm, f"{folder}/start")
        results["every block again"] = outputs(llm)
    client.refresh(llm)
    before = refreshes(llm)
    flush(llm)
    check(llm.update_weights_from_disk(str(MODEL)))
    results["refreshes of an update"] = refreshes(llm) - before
    llm.shutdown()
    return results


def refreshes(llm: Any) -> int:
    """So far, as the last one reports."""
    from sglang_quads import client

    return max((site["refreshes"] for site in client.metrics(llm)[0]), default=0)


PARTS = {
    "graphs": part_graphs,
    "eager first": lambda: part_eager("first"),
    "eager second": lambda: part_eager("second"),
    "default": part_default,
    "release": part_release,
    "compensation": part_compensation,
    "lost": part_lost,
}


def run_parts(out: Path, wanted: list[str], jobs: int) -> dict[str, Any]:
    """Each wanted part in its own process, so many at a time."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    second_checkpoint()  # once, before processes would race for it

    def run(name: str) -> dict[str, Any] | None:
        stem = out / name.replace(" ", "_")
        log, result = stem.with_suffix(".log"), stem.with_suffix(".json")
        result.unlink(missing_ok=True)
        command = [sys.executable, __file__, str(out), "--part", name]
        port = {PORT_VARIABLE: str(31000 + 1500 * list(PARTS).index(name))}
        with log.open("w") as sink:
            code = subprocess.run(
                command, stdout=sink, stderr=sink, env=environment | port, start_new_session=True
            ).returncode
        if code == 0 and result.exists():
            return json.loads(result.read_text())
        if name == "lost":  # SGLang ends this process with its scheduler
            return {"error": "WeightsLostError" in log.read_text()}
        print(f"FAIL {name}: exit {code}\n{log.read_text()[-2500:]}", flush=True)
        return None

    with ThreadPoolExecutor(jobs) as pool:
        found = zip(wanted, pool.map(run, wanted), strict=True)
        return {name: result for name, result in found if result is not None}


def checks(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(what, holds, figures) of everything the results allow to check."""
    found = []
    if {"eager first", "eager second"} <= results.keys():
        expected = {
            f"W{i}": results[f"eager {n}"]["outputs"] for i, n in ((1, "first"), (2, "second"))
        }
        found.append(("W1 and W2 differ", expected["W1"] != expected["W2"], ""))
        found += graph_checks(results.get("graphs"), expected)
        for name, seen in results.get("default", {}).items():
            same = [tokens for tokens, _ in seen] == [tokens for tokens, _ in expected[name]]
            found.append((f"default graphs, {name}: tokens of an eager engine", same, ""))
        if "release" in results:
            release = results["release"]
            found.append(("before a release", release["before"] == expected["W1"], ""))
            found.append(("release, resume, update", release["W2"] == expected["W2"], ""))
            found.append(("fingerprints after a release", release["prints"], ""))
    if "compensation" in results:
        found += compensation_checks(results["compensation"])
    if "lost" in results:
        lost = results["lost"].get("error", False)
        found.append(("running without weights raises WeightsLostError", lost, ""))
    return found


def graph_checks(
    graphs: dict[str, Any] | None, expected: dict[str, Any]
) -> list[tuple[str, bool, str]]:
    """What the engine with captured graphs must show."""
    if graphs is None:
        return []
    found = []
    for key, value in graphs.items():
        if key[:2] in expected:
            found.append((f"graphs {key} = fresh engine", value == expected[key[:2]], ""))
        elif key.startswith("prints"):
            found.append((f"graphs {key}", value, ""))
    flat = graphs["allocated"]
    bad = graphs["bad"]
    return [
        *found,
        ("addresses unchanged", graphs["addresses"], ""),
        ("a NaN is refused by name", "experts.3.w2: NaN or Inf" in bad, bad[:90]),
        ("memory flat over 10 updates", len(set(flat[1:])) == 1, str(flat[-1])),
        ("not emulated", graphs["report"]["backend"] != "emulated", str(graphs["backends"])),
    ]


def compensation_checks(seen: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """What the compensated engine must show."""
    found = []
    empty = all(site["offered"] == 0 for site in seen["captured"].values())
    found.append(("warm-up and capture are not counted", empty, ""))
    for name in ("graphs", "eager"):
        tokens, sites = seen[f"counted, {name}"]["tokens"], seen[f"counted, {name}"]["sites"]
        shared = [s for n, s in sites.items() if n.endswith(".w13")]
        counts = {n for s in shared for n in (s["offered"], *s["count"])}
        # The overlap scheduler hears of a sequence's end after one step more. Padding would be at
        # least three rows for each of three steps.
        once = len(counts) == 1 and counts <= {tokens, tokens + 5}
        top_k = {sum(s["count"]) / max(counts) for n, s in sites.items() if n.endswith(".w2")}
        figures = f"{tokens} tokens, {counts} counted, {top_k} experts each"
        found.append((f"every token counted once, {name}", once and len(top_k) == 1, figures))
    gap = statistics_gap(*(seen[f"counted, {n}"]["sites"] for n in ("graphs", "eager")))
    # Outputs of other batch shapes differ by bfloat16 roundings, which pass through the layers.
    found.append(("statistics of graphs = without", gap < 0.05, f"{gap:.2g} relative"))
    changed = seen["refreshed"]["changed"] and seen["refreshed"]["applied"]
    halves = {n for group in seen["blocks"] for n in group}
    found.append(("a refresh changes lists", changed, f"blocks of a list: {sorted(halves)}"))
    found.append(("it takes effect in graphs", seen["half"] != seen["every block"], ""))
    found.append(("as without graphs", seen["half"] == seen["half, eager"], ""))
    again = seen["every block again"] == seen["every block"]
    found.append(("a loaded selection brings outputs back", again, ""))
    found.append(("addresses of lists unchanged", seen["addresses"], ""))
    once = seen["refreshes of an update"] == 1
    found.append(("an update from disk refreshes once", once, ""))
    report = seen["report"]
    good = (report["method"], report["backend"] != "emulated") == ("quads", True)
    found.append(("quads, not emulated", good, str(report["backend"])))
    return found


def statistics_gap(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Largest difference of w13's means and mean squares, relative to the largest of them."""
    worst = 0.0
    for name in (n for n in first if n.endswith(".w13")):
        for key in ("mean", "m2"):
            a, b = (torch.tensor(found[name][key][0]) for found in (first, second))
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


def main() -> None:
    """Run everything, or one part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time, on one GPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    out, wanted = arguments.out, arguments.only
    out.mkdir(parents=True, exist_ok=True)
    if name := arguments.part:
        result = PARTS[name]()
        (out / f"{name.replace(' ', '_')}.json").write_text(json.dumps(result))
        return
    results = run_parts(out, wanted, arguments.jobs)
    found = checks(results)
    for what, holds, figures in found:
        print(f"{'ok  ' if holds else 'FAIL'} {what} {figures}")
    good = bool(found) and all(holds for _, holds, _ in found) and len(results) == len(wanted)
    print("ok" if good else "FAILED")
    sys.exit(not good)


if __name__ == "__main__":
    main()
