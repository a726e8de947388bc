"""Compares every kernel with the torch code on this GPU, at the sizes of real models.

    PYTHONPATH=common:. python tests/gpu/check_kernels.py --jobs 8

Prints what fails and a line for each group, and exits with 1 if anything failed. ``--quick`` takes
small sizes, for a first look or for Triton's interpreter (``--quick --device cpu`` under
``TRITON_INTERPRET=1``).
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter

    interpreter.apply()

from tests.kernels import (
    compare_activation,
    compare_gemm,
    compare_quantize,
    compare_units,
    compare_variants,
)

# H, I, experts, top_k
SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss": (2880, 2880, 32, 4),
    "nemotron-h tp4": (2688, 464, 128, 6),
}
QUICK = {"small": (160, 48, 4, 2)}


def poison_fresh_memory() -> None:
    """Fill what torch.empty and new_empty return, so that nothing passes by reading it."""

    def poisoned(allocate: Callable) -> Callable:
        def wrapper(*args, **kwargs):
            fresh = allocate(*args, **kwargs)
            if fresh.dtype.is_floating_point and fresh.element_size() > 1:
                return fresh.fill_(torch.nan)
            if fresh.element_size() == 1:
                fresh.view(torch.uint8).fill_(0xFF)
                return fresh
            return fresh.fill_(torch.iinfo(fresh.dtype).max)

        return wrapper

    torch.empty = poisoned(torch.empty)
    torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)


GROUPS = {
    "weights": compare_quantize.weights,
    "storage": compare_quantize.weight_storage,
    "same answers": compare_quantize.same_answers,
    "tokens": compare_quantize.tokens,
    "activations": compare_quantize.activations,
    "odd addresses": compare_quantize.odd_addresses,
    "fast silu": compare_activation.fast_silu,
    "units": compare_units.units,
    "tiled units": compare_units.tiled_units,
    "routing": compare_gemm.routing,
    "linears": compare_gemm.linears,
    "layers": compare_gemm.layers,
    "tiled layers": compare_gemm.tiled_layers,
    "variants": compare_variants.variants,
    "graphs": compare_gemm.graphs,
}
GPU_ONLY = {"graphs"}
PER_SHAPE = {"weights", "tokens", "activations", "units", "layers"}


def run_group(group: str, device: str, shapes: dict, quick: bool, verbose: bool) -> bool:
    """Run the comparisons of a group and print what failed, the layers in any case."""
    start, passed, count, last = time.time(), 0, 0, ""
    for name, ok, text in GROUPS[group](device, shapes, quick):
        count, passed, last = count + 1, passed + ok, f"{name}: {text}"
        if not ok or verbose or group == "layers":
            print(f"  {'ok  ' if ok else 'FAIL'} {name}: {text}", flush=True)
    where = ", ".join(shapes)
    print(f"{group} ({where}): {passed} of {count} in {time.time() - start:.0f} s; last: {last}")
    return count > 0 and passed == count


def groups_of(device: str) -> list[str]:
    return [group for group in GROUPS if device != "cpu" or group not in GPU_ONLY]


def run_jobs(device: str, arguments: list[str], shapes: dict, jobs: int) -> bool:
    """Each group, and each shape of the long ones, in its own process: compiling dominates."""
    tasks = []
    for group in groups_of(device):
        names = shapes if group in PER_SHAPE else [next(iter(shapes))]
        tasks += [[*arguments, "--only", group, "--shape", name] for name in names]
    tasks.sort(key=lambda task: "layers" not in task)

    def run(task: list[str]) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, __file__, *task], capture_output=True, text=True, check=False
        )
        tail = done.stderr[-2000:] if done.returncode not in (0, 1) or not done.stdout else ""
        return done.returncode, done.stdout + tail

    failed = False
    with ThreadPoolExecutor(jobs) as pool:
        for code, text in pool.map(run, tasks):
            print(text, end="", flush=True)
            failed |= code != 0
    return not failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=0, help="run the groups in so many processes")
    parser.add_argument("--only", choices=GROUPS)
    parser.add_argument("--shape", choices=[*SHAPES, *QUICK])
    parser.add_argument("--all", action="store_true", help="print what passes too")
    args = parser.parse_args()
    shapes = QUICK if args.quick else SHAPES
    if args.jobs:
        arguments = ["--device", args.device] + ["--quick"] * args.quick + ["--all"] * args.all
        ok = run_jobs(args.device, arguments, shapes, args.jobs)
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.manual_seed(0)
        poison_fresh_memory()
        if args.shape:
            shapes = {args.shape: shapes[args.shape]}
        groups = [args.only] if args.only else groups_of(args.device)
        passed = [run_group(g, args.device, shapes, args.quick, args.all) for g in groups]
        ok = all(passed)
    if not args.only:
        print("all comparisons passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
