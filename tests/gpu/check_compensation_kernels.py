"""Compares the compensation kernels with the torch code on this GPU, then times whole MoE layers.

    PYTHONPATH=common:. python tests/gpu/check_compensation_kernels.py

Comparisons run at the sizes of Qwen3-30B-A3B, those of the ``hopper`` kernels also at others, each
group in a process of its own; what fails is printed, and the exit status is 1 if anything did.
``timing``: ``benchmarks/bench_compensation.py``, compiled in several processes first. ``--only``
runs some groups, "hopper" (an sm_90 GPU), "comparisons" (all groups) or "timing"; ``--list`` names
the groups.
"""

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks.bench_compensation import WARM, timing, warm
from benchmarks.moe_shapes import SHAPES as ALL_SHAPES
from tests.gpu import check_hopper
from tests.kernels import (
    compare_compensated,
    compare_compensated_rows,
    compare_hopper_compensated,
    compare_statistics,
)

SHAPES = {"qwen3-30b-a3b": ALL_SHAPES["qwen3-30b-a3b"]}

GROUPS: dict[str, Callable] = {
    "statistics": compare_statistics.statistics,
    "operands": compare_compensated_rows.operands,
    "linears": compare_compensated.gemms,
    "plain": compare_compensated.plain_layers,
    "tiled": compare_compensated.tiled_layers,
    "refreshes": compare_compensated.refreshes,
}
GROUPS |= {
    f"layers-{count}": functools.partial(compare_compensated.layers, counts=(count,))
    for count in (1, 16, 128, 512)
}


def hopper_group(shape: str, case: str) -> Callable:
    shapes = {shape: check_hopper.SHAPES[shape]}
    return lambda device, _, quick: compare_hopper_compensated.hopper_layers(
        device, shapes, quick, (case,)
    )


GROUPS |= {
    f"hopper {case}": hopper_group("qwen3-30b-a3b", case)
    for case in compare_hopper_compensated.CASES | compare_hopper_compensated.COLUMN_CASES
}
# Odd numbers of 128s in I: strips that no warps share, and three stages.
GROUPS |= {
    f"hopper {case}, {shape}": hopper_group(shape, case)
    for shape in ("qwen3-235b tp4", "glm-4.5-air")
    for case in ("splice rac", "columns rac")
}
HOPPER = [name for name in GROUPS if name.startswith("hopper ")]


def run_group(name: str, device: str) -> bool:
    start, passed, count, last = time.time(), 0, 0, ""
    for check, ok, text in GROUPS[name](device, SHAPES, False):
        count, passed, last = count + 1, passed + ok, f"{check}: {text}"
        if not ok:
            print(f"  FAIL {last}", flush=True)
    print(f"{name}: {passed} of {count} in {time.time() - start:.0f} s; last: {last}")
    return count > 0 and passed == count


def is_hopper(device: str) -> bool:
    return device != "cpu" and torch.cuda.get_device_capability(device)[0] == 9


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
        print(*GROUPS, sep="\n")
        return 0
    if args.warm:
        warm(args.warm)
        return 0
    several = {"hopper": HOPPER, "comparisons": list(GROUPS)}
    parts = args.only or ["comparisons", "timing"]
    parts = [name for part in parts for name in several.get(part, [part])]
    if set(parts) & set(HOPPER) and not is_hopper(args.device):
        if args.only and "comparisons" not in args.only:
            parser.error("the hopper groups need an sm_90 GPU")
        print("hopper groups: not run, this is no sm_90 GPU")
        parts = [name for name in parts if name not in HOPPER]
    if unknown := set(parts) - {*GROUPS, "timing"}:
        parser.error(f"--only {sorted(unknown)} is none of {['timing', *GROUPS]}")
    if len(parts) == 1 and parts[0] != "timing":
        return 0 if run_group(parts[0], args.device) else 1
    tasks = [["--only", group] for group in parts if group != "timing"]
    if "timing" in parts:
        tasks += [["--warm", name] for name in WARM]
    ok = run_jobs(tasks, args.jobs)
    if "timing" in parts:
        ok = timing() and ok
    print("all comparisons passed" if ok else "FAILED")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
