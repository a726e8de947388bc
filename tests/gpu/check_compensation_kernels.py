"""Compares the compensation kernels with the torch code on this GPU, then times whole MoE layers.

    PYTHONPATH=common:. python tests/gpu/check_compensation_kernels.py

Comparisons run at the sizes of Qwen3-30B-A3B, each group in a process of its own; what fails is
printed, and the exit status is 1 if anything did. Times are those of CUDA graphs with weights that
come from memory: medians in microseconds, and percent over the plain layer. ``--only`` runs some
groups, or the ``timing``; ``--list`` names the groups.
"""

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.moe_data import Layer, Routing, make_layers, make_routings
from benchmarks.timing import graph_time
from quads_common.activation import Activation
from quads_common.compensation.moe import Gathering
from quads_common.compensation.operands import InputCompensation, gather_columns
from quads_common.compensation.statistics import new_statistics
from quads_common.kernels.compensated import fused_moe_compensated_triton
from quads_common.kernels.compensated_rows import compensate_rows
from quads_common.kernels.moe import fused_moe_triton
from quads_common.kernels.route import Routes
from quads_common.kernels.rows import quantize_rows
from quads_common.kernels.statistics import observe_triton
from tests.kernels import compare_compensated, compare_compensated_rows, compare_statistics

SHAPES = {"qwen3-30b-a3b": (2048, 768, 128, 8)}
TOKENS = (1, 4, 16, 64, 128, 256, 4096)
PERIOD = 64

GROUPS: dict[str, Callable] = {
    "statistics": compare_statistics.statistics,
    "operands": compare_compensated_rows.operands,
    "linears": compare_compensated.gemms,
    "plain": compare_compensated.plain_layers,
    "refreshes": compare_compensated.refreshes,
}
GROUPS |= {
    f"layers-{count}": functools.partial(compare_compensated.layers, counts=(count,))
    for count in (1, 16, 128, 512)
}


@dataclass(frozen=True)
class Variant:
    """A layer to time: share of blocks, splice counts of w13 and w2, their columns, the form."""

    ratio: float | None = None
    channels: tuple[int, int] = (0, 0)
    columns: bool = False
    exact: bool = False
    observed: bool = False


SPLICE = (64, 32)
VARIANTS = {
    "RAC 0.5": Variant(0.5),
    "RAC 1.0": Variant(1.0),
    "splice": Variant(None, SPLICE),
    "splice+RAC": Variant(0.5, SPLICE),
    "columns": Variant(None, SPLICE, columns=True),
    "RAC .5 ex": Variant(0.5, exact=True),
    "splice ex": Variant(None, SPLICE, exact=True),
    "spl+RAC ex": Variant(0.5, SPLICE, exact=True),
    "RAC .5 obs": Variant(0.5, observed=True),
    "spl+R obs": Variant(0.5, SPLICE, observed=True),
}


def run_group(name: str, device: str) -> bool:
    start, passed, count, last = time.time(), 0, 0, ""
    for check, ok, text in GROUPS[name](device, SHAPES, False):
        count, passed, last = count + 1, passed + ok, f"{check}: {text}"
        if not ok:
            print(f"  FAIL {last}", flush=True)
    print(f"{name}: {passed} of {count} in {time.time() - start:.0f} s; last: {last}")
    return count > 0 and passed == count


def run_jobs(tasks: list[list[str]], jobs: int) -> bool:
    """Each in a process of its own: compiling dominates."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(task: list[str]) -> tuple[int, str]:
        command = [sys.executable, __file__, *task]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.returncode, done.stdout + (done.stderr[-2000:] if done.returncode else "")

    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for code, text in pool.map(run, tasks):
            print(text, end="", flush=True)
            failed |= code != 0
    return not failed


Call = Callable[[Layer, Routing], torch.Tensor]


def lists_of(layer: Layer, variant: Variant) -> tuple[InputCompensation, InputCompensation]:
    """Random selections of exactly the share and the counts asked for."""
    found = []
    for weight, groups, slots in (
        (layer.w13_bf16, 1, variant.channels[0]),
        (layer.w2_bf16, layer.experts, variant.channels[1]),
    ):
        width = weight.shape[2]
        mask = channels = columns = None
        if variant.ratio is not None:
            order = torch.rand((groups, width // 16), device="cuda").argsort(dim=1)
            mask = order < round(variant.ratio * width / 16)
        if slots:
            order = torch.rand((groups, width), device="cuda").argsort(dim=1)[:, :slots]
            channels = order.sort(dim=1).values.int()
        if variant.columns and channels is not None:
            own = channels.expand(layer.experts, -1)
            columns = torch.stack([gather_columns(w, c) for w, c in zip(weight, own, strict=True)])
        found.append(InputCompensation(mask, channels, columns))
    return found[0], found[1]


def call_of(variant: Variant, layers: list[Layer]) -> Call:
    """The layer with this variant's lists, which differ from layer to layer."""
    lists = {id(layer): lists_of(layer, variant) for layer in layers}
    statistics = {id(layer): statistics_of(layer) for layer in layers}

    def call(layer: Layer, r: Routing) -> torch.Tensor:
        first, second = lists[id(layer)]
        gathering = None
        if variant.observed:
            gathering = Gathering(*statistics[id(layer)], PERIOD, all_real(r.x.shape[0]))
        return fused_moe_compensated_triton(
            r.x, layer.w13, layer.w2, r.weights, r.ids, w13_input=first, w2_input=second,
            gathering=gathering, exact=variant.exact,
        )  # fmt: skip

    return call


@functools.cache
def all_real(tokens: int) -> torch.Tensor:
    return torch.ones(tokens, dtype=torch.bool, device="cuda")


def statistics_of(layer: Layer):
    both = (
        new_statistics(1, layer.w13.shape[2], device="cuda"),
        new_statistics(layer.experts, layer.w2.shape[2], device="cuda"),
    )
    for stats in both:
        stats.enabled.fill_(True)
    return both


def plain(layer: Layer, r: Routing) -> torch.Tensor:
    return fused_moe_triton(r.x, layer.w13, layer.w2, r.weights, r.ids)


def calls_of(layers: list[Layer], names: list[str]) -> dict[str, Call]:
    return {name: call_of(VARIANTS[name], layers) for name in names}


def warm(name: str) -> bool:
    """Compile what a variant launches for every number of tokens."""
    layers = make_layers("qwen3-30b-a3b", 1)
    call = plain if name == "plain" else calls_of(layers, [name])[name]
    for tokens in TOKENS:
        call(layers[0], make_routings("qwen3-30b-a3b", tokens)[0])
    if name == "plain":
        rows_table(layers)
        observe_table(layers)
    torch.cuda.synchronize()
    return True


def timing() -> bool:
    """The table; a result that is far from the plain layer's is not timed."""
    layers = make_layers("qwen3-30b-a3b", 3)
    calls = calls_of(layers, list(VARIANTS))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: us, and % over plain")
    print(" ".join(f"{h:>12}" for h in ["tokens", "plain", "again", *calls]), flush=True)
    ok = True
    for tokens in TOKENS:
        routings = make_routings("qwen3-30b-a3b", tokens)
        pairs = [(layer, r) for r in routings for layer in layers]

        def measure(call: Call, pairs=pairs) -> float:
            work = [functools.partial(call, *pair) for pair in pairs]
            return graph_time(work, replays=6 if len(pairs[0][1].x) > 1000 else 20)

        base = measure(plain)
        row = []
        for name, call in calls.items():
            want, got = plain(*pairs[0]).double(), call(*pairs[0]).double()
            far = float((got - want).norm() / want.norm())
            if not far < 0.3:
                ok = False
                print(f"  FAIL {name}, {tokens} tokens: {far:.1e} away from plain")
                continue
            took = measure(call)
            row.append(f"{took:6.1f} {100 * (took / base - 1):+5.1f}")
        print(f"{tokens:12} {base:12.1f} {measure(plain):12.1f}", *row, flush=True)
    rows_table(layers, timed=True)
    observe_table(layers, timed=True)
    return ok


def rows_table(layers: list[Layer], timed: bool = False) -> None:
    """The quantizers alone, of both inputs."""
    hidden, inner, experts, top_k = SHAPES["qwen3-30b-a3b"]
    names = ["RAC 0.5", "splice", "splice+RAC", "columns"]
    lists = {name: lists_of(layers[0], VARIANTS[name]) for name in names}
    if timed:
        print("quantizers, us: " + " ".join(f"{h:>10}" for h in ["plain", *names]))
    for tokens in (16, 128, 4096):
        ids = torch.randint(0, experts, (tokens, top_k), device="cuda", dtype=torch.int32)
        routes = Routes(ids, None, experts)
        sets = 8
        x = torch.randn((sets, tokens, hidden), device="cuda", dtype=torch.bfloat16)
        y = torch.randn((sets, tokens * top_k, 2 * inner), device="cuda", dtype=torch.bfloat16)
        options: dict = {"activation": Activation(), "routes": routes}
        for what, source, extra, which in (("w13", x, {}, 0), ("w2", y, options, 1)):
            calls = {"plain": functools.partial(quantize_rows, **extra)}
            for name in names:
                calls[name] = functools.partial(
                    compensate_rows, compensation=lists[name][which], **extra
                )
            if not timed:
                for call in calls.values():
                    call(source[0])
                continue
            row = [
                f"{graph_time([functools.partial(call, s) for s in source]):10.2f}"
                for call in calls.values()
            ]
            print(f"{what:>4} {tokens:10} ", *row, flush=True)


def observe_table(layers: list[Layer], timed: bool = False) -> None:
    """Statistics alone, one launch after the other; enabled, and switched off."""
    hidden, inner, experts, top_k = SHAPES["qwen3-30b-a3b"]
    lists = lists_of(layers[0], VARIANTS["splice+RAC"])
    for tokens in (1, 32, 128, 256, 4096):
        x = torch.randn((tokens, hidden), device="cuda", dtype=torch.bfloat16)
        y = torch.randn((tokens * top_k, 2 * inner), device="cuda", dtype=torch.bfloat16)
        scores = torch.rand((tokens, experts), device="cuda")
        routes = Routes(scores.topk(top_k, dim=1).indices.int(), None, experts)
        mask = all_real(tokens)
        stats = [statistics_of(layer) for layer in layers]
        first = [
            functools.partial(observe_triton, s[0], x, lists[0], PERIOD, row_mask=mask)
            for s in stats
        ]
        options: dict = {"row_mask": mask, "routes": routes, "activation": Activation()}
        second = [
            functools.partial(observe_triton, s[1], y, lists[1], PERIOD, **options) for s in stats
        ]
        if not timed:
            first[0](), second[0]()
            continue
        on = graph_time(first), graph_time(second)
        for both in stats:
            for s in both:
                s.enabled.fill_(False)
        off = graph_time(first), graph_time(second)
        print(
            f"observe, {tokens} tokens: w13 {on[0]:.2f} w2 {on[1]:.2f} us; "
            f"switched off {off[0]:.2f} {off[1]:.2f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--only", nargs="+", default=[], help="groups, or timing")
    parser.add_argument("--warm", help="compile what a variant needs, for the timing")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    if args.list:
        print(*GROUPS)
        return 0
    if args.warm:
        return 0 if warm(args.warm) else 1
    parts = args.only or [*GROUPS, "timing"]
    if unknown := set(parts) - {*GROUPS, "timing"}:
        parser.error(f"--only {sorted(unknown)} is none of {['timing', *GROUPS]}")
    if len(parts) == 1 and parts[0] != "timing":
        return 0 if run_group(parts[0], args.device) else 1
    tasks = [["--only", group] for group in parts if group != "timing"]
    if "timing" in parts:
        tasks += [["--warm", name] for name in ("plain", *VARIANTS)]
    ok = run_jobs(tasks, args.jobs)
    if "timing" in parts:
        ok = timing() and ok
    print("all comparisons passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
