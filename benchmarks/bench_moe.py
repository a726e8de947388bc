"""Is the NVFP4 MoE layer faster than vLLM's BF16, FP8 and Marlin layers?

    PYTHONPATH=common:. python benchmarks/bench_moe.py                    # beside vLLM's layers
    PYTHONPATH=common:. python benchmarks/bench_moe.py --stages --peers "" # where our time goes
    PYTHONPATH=common:. python benchmarks/bench_moe.py --sweep gemm1 --tokens 16,128

"w4a4" and "w4a16" run on the backend that the layer gets on this GPU, "triton" is W4A4 on that one.
Whole layers, from hidden states to output in the model's dtype: routing tables, quantization, both
GEMMs, activation and top-k sum. The same weights and routings for all; every result is compared
with the torch code before it is timed. CUDA graph replay, median, several layers and routings in
turn so that weights come from memory. Microseconds; "/fp8": FP8's time over ours (W4A4);
"roofline": the time in which the NVFP4 weights of the experts that are used can be read, by the
read rate measured in the same run, over ours. What cannot be built, is wrong or fails shows as
"-", and the reason stands under the table. Ends after ``--budget`` seconds, with what it has.
``--plot`` draws the roofline fractions of all columns, each by the bytes of its own format.
"""

import argparse
import functools
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import moe_peers, moe_sweep
from benchmarks.moe_data import Layer, Routing, make_layers, make_routings
from benchmarks.moe_roofline import plot, roofline
from benchmarks.moe_shapes import SHAPES
from benchmarks.timing import graph_time, read_rate
from quads_common.activation import Activation
from quads_common.kernels import hopper
from quads_common.kernels.gemm import grouped_gemm
from quads_common.kernels.moe import fused_moe_hopper, fused_moe_triton, moe_config
from quads_common.kernels.route import Routes, make_table, sum_slots_triton
from quads_common.kernels.rows import quantize_rows
from quads_common.moe import fused_moe

Call = Callable[[Layer, Routing], torch.Tensor]

# Seconds that the last row may take, compiling included; and to start at all.
RESERVE, LEAST_BUDGET = 40.0, 90.0


def ours(act: str, backend: str) -> Call:
    def call(layer: Layer, r: Routing) -> torch.Tensor:
        w13, w2 = layer.stored(backend)
        moe = fused_moe_hopper if backend == "hopper" else fused_moe_triton
        return moe(r.x, w13, w2, r.weights, r.ids, act=act)

    return call


def rms(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def wrong(name: str, call: Call, layer: Layer, routing: Routing) -> str:
    """Empty if the layer's output is what its format allows: rms error against the torch code."""
    if name in ("w4a4", "w4a16", "triton", "marlin"):
        act = "nvfp4" if name in ("w4a4", "triton") else "bf16"
        want = fused_moe(routing.x, layer.w13, layer.w2, routing.weights, routing.ids, act=act)
    else:
        want = moe_peers.reference(layer, routing)
    error = rms(call(layer, routing), want)
    limit = {
        "w4a4": 2e-2,
        "triton": 2e-2,
        "w4a16": 5e-3,
        "marlin": 1e-2,
        "bf16": 1e-2,
        "fp8": 8e-2,
    }[name]
    return "" if error <= limit else f"rms error {error:.1e} above {limit:.0e}"


def measure(
    name: str, call: Call, layers: list[Layer], routings: list[Routing], failures: list[str]
) -> float:
    """Microseconds of a layer; NaN and a line in ``failures`` if it is wrong or fails."""
    tokens = routings[0].x.shape[0]
    try:
        reason = wrong(name, call, layers[0], routings[0])
        if not reason:
            return time_call(call, layers, routings)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error)[:300]}"
    failures.append(f"{name}, {tokens} tokens: {reason}")
    return math.nan


def time_call(call: Call, layers: list[Layer], routings: list[Routing]) -> float:
    pairs = [(layer, r) for r in routings for layer in layers]
    return graph_time([functools.partial(call, *pair) for pair in pairs])


def stages(layers: list[Layer], routings: list[Routing], act: str) -> dict[str, float]:
    """Microseconds of each launch of our layer, each in a graph of its own."""
    result = {}
    quantized, work = act == "nvfp4", []
    for layer in layers:
        for r in routings:
            tokens, top_k = r.ids.shape
            config = moe_config(tokens, top_k, layer.experts)
            routes = Routes(r.ids, None, layer.experts)
            table = make_table(routes, config.gemm1.block_m)
            x = quantize_rows(r.x, quantized=quantized).operand
            y = r.x.new_empty((tokens * top_k, layer.w13.shape[1]))
            grouped_gemm(x, layer.w13, y, config=config.gemm1, table=table, top_k=top_k)
            activated = functools.partial(
                quantize_rows, y, activation=Activation(), quantized=quantized, routes=routes
            )
            slots = y.new_empty((tokens * top_k, r.x.shape[1]), dtype=torch.float32)
            work.append(
                {
                    "quantize": functools.partial(quantize_rows, r.x, quantized=quantized),
                    "table": functools.partial(make_table, routes, config.gemm1.block_m),
                    "gemm1": functools.partial(
                        grouped_gemm, x, layer.w13, y, config=config.gemm1, table=table, top_k=top_k
                    ),
                    "activation": activated,
                    "gemm2": functools.partial(
                        grouped_gemm, activated().operand, layer.w2, slots, config=config.gemm2,
                        table=table, router_weight=r.weights,
                    ),
                    "sum": functools.partial(sum_slots_triton, slots, routes, r.x.dtype),
                }
            )  # fmt: skip
    for name in work[0]:
        result[name] = graph_time([calls[name] for calls in work])
    return result


def hopper_stages(layers: list[Layer], routings: list[Routing], act: str) -> dict[str, float]:
    """The same of the ``hopper`` datapath; nothing where it is not the one that runs."""
    experts, hidden, inner = layers[0].w2.shape
    tokens, top_k = routings[0].ids.shape
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    plan = hopper.decode_plan(tokens, top_k, experts, hidden, inner, processors)
    if plan is None or layers[0].backend != "hopper":
        return {}
    work = []
    for layer in layers:
        for r in routings:
            routes = Routes(r.ids, None, experts)
            quantize = functools.partial(quantize_rows, r.x, quantized=act == "nvfp4")
            slots = torch.randn((tokens * top_k, hidden), device="cuda")
            work.append(
                {
                    "quantize": quantize,
                    plan.form: functools.partial(
                        hopper.decode_experts, quantize().operand, *layer.stored("hopper"), routes,
                        r.weights, plan, None,
                    ),
                    "sum": functools.partial(sum_slots_triton, slots, routes, r.x.dtype),
                }
            )  # fmt: skip
    return {name: graph_time([calls[name] for calls in work]) for name in work[0]}


def compare(args: argparse.Namespace, layers: list[Layer], rate: float, deadline: float) -> None:
    """Print the table, a row for each number of tokens, and what is missing in it."""
    failures: list[str] = []
    fractions: dict[int, dict[str, float]] = {}
    backend = layers[0].backend
    calls: dict[str, Call] = {"w4a4": ours("nvfp4", backend), "w4a16": ours("bf16", backend)}
    if backend != "triton":
        calls["triton"] = ours("nvfp4", "triton")
    own = list(calls)
    names = [p for p in args.peers.split(",") if p]
    calls |= moe_peers.peers(names, layers, failures)
    columns = [*own, *names]
    print(" ".join(f"{h:>8}" for h in ["tokens", *columns, "/fp8", "roofline"]), flush=True)
    for tokens in (int(t) for t in args.tokens.split(",")):
        if time.monotonic() > deadline:
            failures.append(f"{tokens} tokens and what follows: the budget was used up")
            break
        routings = make_routings(args.shape, tokens, args.skew)
        times = {
            name: measure(name, calls[name], layers, routings, failures)
            if name in calls
            else math.nan
            for name in columns
        }
        floor = sum(layers[0].nbytes(r) for r in routings) / len(routings) / rate * 1e6
        fractions[tokens] = roofline(times, floor)
        ratios = [times.get("fp8", math.nan) / times["w4a4"], fractions[tokens]["w4a4"]]
        row = [f"{v:8.1f}" for v in times.values()] + [f"{v:8.2f}" for v in ratios]
        print(f"{tokens:8}", *(f"{'-':>8}" if "nan" in v else v for v in row), flush=True)
        if args.stages:
            for act in ("nvfp4", "bf16"):
                parts = hopper_stages(layers, routings, act)
                parts = parts or stages(layers, routings, act)
                text = ", ".join(f"{k} {v:.1f}" for k, v in parts.items())
                print(f"{'':8} {act}: {text}; sum {sum(parts.values()):.1f}", flush=True)
    if args.plot is not None and fractions:
        plot(fractions, args.plot, f"{torch.cuda.get_device_name()}, {args.shape}")
    for line in failures:
        print(f"NOT MEASURED {line}")
    print(f"read rate {rate / 1e12:.2f} TB/s; {len(failures)} missing")


def stop_after(seconds: float) -> None:
    """End the process then, whatever it is waiting for."""

    def stop() -> None:
        print(f"STOPPED after {seconds:.0f} s, in the middle of a measurement", flush=True)
        os._exit(1)

    timer = threading.Timer(seconds, stop)
    timer.daemon = True
    timer.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", default="128,64,16,256,1,4,1024,4096")
    parser.add_argument("--peers", default="bf16,fp8,marlin", help="of vLLM, comma separated")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--skew", action="store_true", help="Zipf routing instead of uniform")
    parser.add_argument("--stages", action="store_true", help="also time each launch of ours")
    parser.add_argument("--sweep", choices=["gemm1", "gemm2"], help="time tiles of one GEMM only")
    parser.add_argument("--budget", type=float, default=240, help="seconds for all")
    parser.add_argument("--plot", type=Path, help="PNG file to write; needs matplotlib")
    args = parser.parse_args()
    if args.budget < LEAST_BUDGET:
        parser.error(f"--budget {args.budget:.0f}: at least {LEAST_BUDGET:.0f} seconds")
    deadline = time.monotonic() + args.budget - RESERVE
    stop_after(args.budget)
    counts = [int(t) for t in args.tokens.split(",")]
    if args.sweep:
        moe_sweep.warm(args.shape, args.sweep, counts)
    torch.manual_seed(0)
    layers = make_layers(args.shape, args.layers)
    backend = layers[0].backend
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.shape}, {backend}")
    rate = read_rate()
    if args.sweep:
        for count in counts:
            routings = make_routings(args.shape, count, args.skew)
            moe_sweep.sweep(args.sweep, layers, routings, rate)
    else:
        compare(args, layers, rate, deadline)


if __name__ == "__main__":
    main()
