"""Compensation in a vLLM engine on a GPU: padding in CUDA graphs, sleep mode, cost of gathering.

    python tests/gpu/check_compensation.py OUT_FOLDER [--only "padding quads" decode]

Needs vLLM, this package with its entry points, and one GPU. Every engine runs in a process of its
own. Prints one line per check and ends with FAILED or ok.

1. Five requests decode in a graph captured for eight. The three padded rows of every MoE input are
   set to 1e4 inside the graph, and then left as they are: statistics are the same bit for bit, and
   the rows counted are the tokens that were computed. For ``quads`` and ``quads_splice``.
2. A refresh and a file change no address, so the graph serves the new lists: outputs equal those of
   a fresh eager engine that starts with the file.
3. Statistics survive sleep level 2.
4. Time of a decode step with gathering at the default rate and without: at most 1% more. 48 layers
   of Qwen3-30B-A3B's shape, batches of 8 and 128. Both in one engine, in turns: without gathering
   no row of a forward is sampled. The time of counting is told too.
5. A refresh in that engine takes less than 5% of the time of a weight sync.
6. ``foursight`` on backend ``hopper``: after a sync every expert's BF16 columns are those of the
   weights that came, of the channels in force, in the order that the kernels read.
"""

import json
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from check_sync import run_together
from sync_engine import (
    GRAPHS,
    MODEL,
    PROMPTS,
    big_config,
    big_weights,
    engine,
    outputs,
    second_weights,
    sync,
    worker_of,
)

from quads_common.compensation.operands import gather_columns

CAPTURED, BATCH, STEPS = 8, 5, 12
POISON = 1e4
# Of check 4: layers, batches, decode steps that are timed, pairs of runs.
LAYERS, SIZES, DECODED, ROUNDS = 48, [8, 128], 128, 16
OPTIONS = {"sampling_rate": 1, "min_tokens": 8, "splice_count_w13": 16, "splice_count_w2": 16}
FILE = "selection.safetensors"


def options_of(method: str) -> dict[str, Any]:
    """Options of the method; ``quads`` has no channels to count."""
    counts = OPTIONS if method == "quads_splice" else {k: OPTIONS[k] for k in list(OPTIONS)[:2]}
    return {"quads": {"method": method, **counts}}


def compensator_of(llm: Any) -> Any:
    """Of the engine's only worker."""
    return worker_of(llm).vllm_config.quant_config.runtime.compensator


def counted(llm: Any) -> dict[str, list[Any]]:
    """Every statistics buffer as numbers, with all rows counted that waited."""
    compensator_of(llm).count_staged()
    return {
        f"{s.site.name}/{name}": t.double().cpu().flatten().tolist()
        for s in compensator_of(llm).states
        for name, t in s.statistics.buffers().items()
    }


def clear(llm: Any) -> None:
    """Statistics as in a new engine."""
    compensator_of(llm).forget()
    for state in compensator_of(llm).states:
        state.statistics.offered.zero_()


def decode(llm: Any, batch: int) -> int:
    """Some requests, ``STEPS`` tokens each; returns the tokens that went through the model."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
    found = llm.generate(PROMPTS[:batch], params, use_tqdm=False)
    return sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in found)


def poisoned_apply(limit: torch.Tensor) -> None:
    """Rows from ``limit`` on of a captured batch become 1e4 before a MoE layer sees them."""
    from vllm_quads.fused_moe import QuadsMoEMethod

    plain = QuadsMoEMethod.apply

    def apply(method: Any, layer: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.shape[0] == CAPTURED:
            rows = torch.arange(CAPTURED, device=x.device).unsqueeze(1)
            x = torch.where(rows < limit, x, POISON)
        return plain(method, layer, x, *args, **kwargs)

    QuadsMoEMethod.apply = apply


def part_padding(method: str, out: Path) -> dict[str, Any]:
    """Checks 1 and 2."""
    limit = torch.full((1,), CAPTURED, device="cuda")
    poisoned_apply(limit)
    llm = engine(
        MODEL,
        quantization="quads_nvfp4",
        compilation_config=GRAPHS,
        additional_config=options_of(method),
    )
    report = llm.collective_rpc("quads_report")[0]
    results: dict[str, Any] = {"report": report, "start": counted(llm)}
    runs = []
    for first_padded in (CAPTURED, BATCH, CAPTURED):
        limit.fill_(first_padded)
        clear(llm)
        tokens = decode(llm, BATCH)
        runs.append(counted(llm))
    results["runs"], results["tokens"] = runs, tokens
    results["before"] = outputs(llm)
    results["refreshed"] = llm.collective_rpc("quads_refresh")[0]["changed"]
    llm.collective_rpc("quads_save_selection", args=(str(out / f"{method}_{FILE}"),))
    results["after"] = outputs(llm)
    return results


def part_eager(method: str, out: Path) -> dict[str, Any]:
    """A fresh engine that starts with the file."""
    options = {"quads": {**options_of(method)["quads"], "selection_file": ""}}
    options["quads"]["selection_file"] = str(out / f"{method}_{FILE}")
    llm = engine(MODEL, quantization="quads_nvfp4", enforce_eager=True, additional_config=options)
    return {"outputs": outputs(llm)}


def part_sleep() -> dict[str, Any]:
    """Check 3; the sync must not be a boundary that is due."""
    options = options_of("quads_splice")
    options["quads"]["refresh_interval"] = 100
    llm = engine(
        MODEL,
        quantization="quads_nvfp4",
        compilation_config=GRAPHS,
        additional_config=options,
        enable_sleep_mode=True,
    )
    decode(llm, BATCH)
    before = counted(llm)
    llm.sleep(level=2)
    llm.wake_up(tags=["weights"])
    sync(llm, second_weights(), "one by one")
    llm.wake_up(tags=["kv_cache"])
    return {"same": counted(llm) == before, "rows": max(max(v, default=0) for v in before.values())}


def part_decode() -> dict[str, Any]:
    """Check 4: seconds of a decode step by batch size, of ``ROUNDS`` pairs (with, without)."""
    llm = engine(
        big_config(Path("/tmp/big-compensation"), LAYERS),
        load_format="dummy",
        quantization="quads_nvfp4",
        compilation_config={**GRAPHS, "cudagraph_capture_sizes": SIZES},
        max_num_seqs=max(SIZES),
        max_model_len=512,
        gpu_memory_utilization=0.6,
        kv_cache_memory_bytes=4 << 30,
        additional_config={"quads": {"method": "quads"}},
    )
    from vllm import SamplingParams

    runtime = worker_of(llm).vllm_config.quant_config.runtime
    begin, count, calls, tokens = runtime.begin, runtime.count_staged, [], 0

    def run(batch: int, steps: int, gathering: bool) -> float:
        """Seconds; without gathering the runtime hears of no forward."""
        nonlocal tokens
        runtime.begin = begin if gathering else lambda tokens: False
        params = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        prompts = [{"prompt_token_ids": [3 + i % 7, 4, 5]} for i in range(batch)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        taken = time.perf_counter() - start
        tokens += batch * (3 + steps - 1) if gathering else 0
        return taken

    runtime.count_staged = lambda: (calls.append(1), count())
    found: dict[str, Any] = {"steps": {}, "counts": {}}
    for batch in SIZES:
        pairs = []
        for i in range(ROUNDS + 1):
            seconds = {}
            for gathering in (True, False) if i % 2 else (False, True):
                calls.clear()
                short = run(batch, 2, gathering)
                seconds[gathering] = (run(batch, 2 + DECODED, gathering) - short) / DECODED
                if gathering:
                    found["counts"][str(batch)] = len(calls)
            pairs.append([seconds[True], seconds[False]])
        found["steps"][str(batch)] = pairs[1:]
    runtime.count_staged()
    found["offered"] = [int(s.statistics.offered) for s in compensator_of(llm).states]
    found["tokens"] = tokens
    states = compensator_of(llm).states
    found["rows"] = {s.site.name: float(s.statistics.count.sum()) for s in states}
    found["counting"] = counting_time(runtime, count)
    found["places"] = runtime.places
    print(json.dumps(found), flush=True)
    found["sync"], found["refresh"] = sync_and_refresh_time(llm)
    return found


def sync_and_refresh_time(llm: Any) -> tuple[float, float]:
    """Seconds of a sync without a refresh and of a refresh after it, the shortest of three."""
    compensator, weights, times = compensator_of(llm), dict(big_weights(LAYERS)), []
    compensator.options = replace(compensator.options, refresh_interval=1_000_000)
    for _ in range(4):
        stamps = []
        for work in (lambda: sync(llm, weights, "reload"), compensator.refresh_now):
            torch.cuda.synchronize()
            stamps.append(time.perf_counter())
            work()
        torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        times.append([after - before for before, after in pairwise(stamps)])
    sync_times, refresh_times = zip(*times[1:], strict=True)
    return min(sync_times), min(refresh_times)


def part_columns() -> dict[str, Any]:
    """Check 6: by input, its channels, whether its columns are tiled, how many values differ."""
    llm = engine(
        big_config(Path("/tmp/big-columns"), 2),
        load_format="dummy",
        quantization="quads_nvfp4",
        enforce_eager=True,
        additional_config={"quads": {"method": "foursight", "sampling_rate": 1, "min_tokens": 8}},
    )
    decode(llm, BATCH)
    weights = dict(big_weights(2))
    sync(llm, weights, "reload")
    found = {}
    for name, columns in compensator_of(llm)._columns.items():
        experts, kind = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if kind == "w13" else ("down_proj",)
        lists, layout = columns.state.selection.channels, columns.layout
        differ = 0
        for e in range(len(columns.columns)):
            weight = torch.cat([weights[f"{experts}.{e}.{part}.weight"] for part in parts])
            want = gather_columns(weight, lists[e if len(lists) > 1 else 0])
            stored = columns.columns[e]
            differ += int((stored != (layout.tile_columns(want) if layout else want)).sum())
        found[name] = [int((lists >= 0).sum()), layout is not None, differ]
    decode(llm, BATCH)
    return found


def counting_time(runtime: Any, count: Any) -> dict[str, float]:
    """Seconds of counting when every place is taken: on the GPU, and until the host goes on."""
    inputs = list(runtime._inputs.values())
    full = [torch.randint_like(s.groups, len(s.statistics.count)) for s in inputs]
    times = []
    for _ in range(11):
        for staged, groups in zip(inputs, full, strict=True):
            staged.groups.copy_(groups)
        runtime._uncounted = 1
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        before = time.perf_counter()
        start.record()
        count()
        end.record()
        host = time.perf_counter() - before
        end.synchronize()
        times.append((start.elapsed_time(end) / 1e3, host))
    gpu, host = (statistics.median(t[i] for t in times) for i in (0, 1))
    return {"gpu": gpu, "host": host}


PARTS = {
    "padding quads": lambda out: part_padding("quads", out),
    "padding quads_splice": lambda out: part_padding("quads_splice", out),
    "sleep": lambda out: part_sleep(),
    "eager quads": lambda out: part_eager("quads", out),
    "eager quads_splice": lambda out: part_eager("quads_splice", out),
    "decode": lambda out: part_decode(),
    "columns": lambda out: part_columns(),
}
TOGETHER = (
    ("padding quads", "padding quads_splice", "sleep"),
    ("eager quads", "eager quads_splice", "columns"),
    ("decode",),
)


def checks(results: dict[str, Any]) -> list[tuple[str, bool, str]]:
    """(what, holds, figures) of everything the results allow to check."""
    found = []
    for method in ("quads", "quads_splice"):
        padding = results.get(f"padding {method}")
        if padding is None:
            continue
        start, (plain, poisoned, again), tokens = (
            padding["start"],
            padding["runs"],
            padding["tokens"],
        )
        served = padding["report"]["method"]
        found.append((f"{method}: served", served == method, served))
        none = not any(start[name][0] for name in start if name.endswith(("/count", "/offered")))
        found.append((f"{method}: warm-up and capture counted nothing", none, ""))
        offered = {plain[name][0] for name in plain if name.endswith("/offered")}
        found.append((f"{method}: every token once", offered == {tokens}, f"{offered} {tokens=}"))
        found.append((f"{method}: poisoned padding changes nothing", plain == poisoned, ""))
        found.append((f"{method}: repeated", plain == again, ""))
        found.append(
            (f"{method}: a refresh changes outputs", padding["before"] != padding["after"], "")
        )
        eager = results.get(f"eager {method}")
        if eager is not None:
            same = eager["outputs"] == padding["after"]
            found.append((f"{method}: the graph serves the new lists", same, ""))
    if "sleep" in results:
        sleep = results["sleep"]
        found.append(("statistics survive sleep level 2", sleep["same"] and sleep["rows"] > 0, ""))
    for name, (channels, tiled, differ) in results.get("columns", {}).items():
        ok = channels > 0 and tiled and differ == 0
        figures = f"{channels} channels, {tiled=}, {differ} values differ"
        found.append((f"columns of {name}", ok, figures))
    if "decode" in results:
        decode = results["decode"]
        tokens = decode["tokens"]
        few = {n: r for n, r in decode["rows"].items() if not r >= tokens // 64 - 1}
        ok = set(decode["offered"]) == {tokens} and not few
        figures = f"{tokens} tokens; {len(few)} of {len(decode['rows'])} inputs lack rows: "
        found.append(("gathering counts", ok, figures + str(dict(list(few.items())[:8]))))
        gpu, host = (decode["counting"][name] * 1e6 for name in ("gpu", "host"))
        for batch, pairs in decode["steps"].items():
            on, off = (statistics.median(pair[i] for pair in pairs) * 1e6 for i in (0, 1))
            costs = sorted(pair[0] / pair[1] - 1 for pair in pairs)
            low, high = (costs[len(costs) * i // 4] for i in (1, 3))
            cost = statistics.median(costs)
            between = decode["places"] * 64 / int(batch)
            figures = (
                f"{on:.1f} and {off:.1f} us a step, quartiles {low:.2%} and {high:.2%}; counting: "
                f"{gpu:.0f} us ({host:.0f} on the host) once in {between:.0f} steps, "
                f"{gpu / between / off:.3%} of them; {decode['counts'][batch]} times in {DECODED}"
            )
            found.append(
                (f"batch {batch}: gathering costs {cost:.2%} (at most 1%)", cost <= 0.01, figures)
            )
        share = decode["refresh"] / decode["sync"]
        figures = f"{decode['refresh'] * 1e3:.2f} of {decode['sync'] * 1e3:.1f} ms"
        found.append((f"a refresh takes {share:.1%} of a sync (below 5%)", share < 0.05, figures))
    return found


def main() -> None:
    """Run everything, or one part."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    if "--part" in sys.argv:
        name = sys.argv[-1]
        result = PARTS[name](out)
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
