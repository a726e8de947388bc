"""Runs every kernel at small odd shapes under the tools of NVIDIA's compute-sanitizer, on this GPU.

    PYTHONPATH=common:. python3 tests/gpu/sanitize_kernels.py --jobs 8

Each group of kernels runs in a process of its own under each tool, and its results are compared as
in ``check_kernels.py``, ``check_hopper.py`` and ``check_compensation_kernels.py``. Prints one table
and the distinct reports; exits with 1 for a report, a wrong result, a kernel that was not launched
and a group that did not finish. ``--device cpu`` runs the Triton groups in the interpreter, without
a sanitizer.

- "planted" has an error for each tool, in kernels made by NVRTC and by Triton, and fails unless the
  tool finds it: so filters and options are known to let the tool see kernels of both kinds.
- memcheck and initcheck run with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``. PyTorch's allocator cuts
  tensors out of blocks that it keeps, within which an access behind a tensor is valid to memcheck
  and the last owner's bytes count as initialized. So each tensor is a cudaMalloc of its exact size;
  memcheck adds padding, lest one tensor's end be another's start. Graphs cannot be captured then.
- memcheck, racecheck and synccheck look at our kernels only, by name. initcheck must see PyTorch's
  too, which write our inputs: what it reports of those, and of copies, is counted apart. Memory is
  not poisoned: poison initializes.
- Failed API calls are not reported: libraries try calls that may fail. Ours raise.
"""

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.language as tl

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels import interpreter

    interpreter.apply()

from quads_common.kernels import hopper, units
from quads_common.kernels.cuda import nvrtc
from quads_common.kernels.hopper import DecodePlan
from tests.gpu import check_hopper
from tests.gpu.check_hopper import FEW, FUSED, PAIR
from tests.kernels import (
    compare_compensated,
    compare_compensated_rows,
    compare_edges,
    compare_gemm,
    compare_hopper_compensated,
    compare_quantize,
    compare_statistics,
    compare_units,
    compare_variants,
)
from tests.kernels.sanitizer_report import Report, read_report
from tests.qat import interpreted_kernels

Check = tuple[str, bool, str]

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
# H, I, experts, top_k
SHAPES = {"small": (160, 48, 4, 2)}
HOPPER = {"small": check_hopper.SHAPES["small"]}
# Programs of a launch that completes a unit wait for each other: few, as they are slow here.
UNIT_PROGRAMS = 32
PLANTED = Path(__file__).parent / "planted.cu"
PLANTED_NAMES = {*(f"planted_{tool}" for tool in TOOLS), "planted_copy"}
DONE = "sanitized part done:"


def quick(*functions: Callable) -> Callable[[str], Iterator[Check]]:
    def checks(device: str) -> Iterator[Check]:
        for function in functions:
            yield from function(device, SHAPES, True)

    return checks


def unit_checks(device: str) -> Iterator[Check]:
    units.MAX_PROGRAMS = UNIT_PROGRAMS
    yield from quick(compare_units.units, compare_units.tiled_units)(device)


def routes_and_linears(device: str) -> Iterator[Check]:
    """Tables of one chunk of slots and of several; every tile of the linears."""
    yield from compare_gemm.routing(device, {"small": (0, 0, 8, 2)}, False)
    for config in compare_gemm.CONFIGS:
        for act, dtype in compare_gemm.FORMATS:
            yield from compare_gemm.one_linear(device, 5, 50, 96, config, act, dtype)


def moe_layers(device: str) -> Iterator[Check]:
    """Every tile of ``moe_config``, by the number of tokens."""
    yield from compare_gemm.layers(device, SHAPES, False, (1, 3, 41, 70))
    yield from compare_gemm.tiled_layers(device, SHAPES, True)


def qat_weights(device: str) -> Iterator[Check]:
    """The sizes of the interpreter's test."""
    count = interpreted_kernels.compare(device, interpreted_kernels.weights("cpu"))
    yield "fake quantization", count > 0, f"{count} comparisons"


def hopper_tables(device: str) -> Iterator[Check]:
    for experts, top_k, tokens in ((12, 3, 1), (12, 3, 100), (512, 10, 409), (1, 1, 64)):
        for kind in check_hopper.ROUTINGS:
            for plan in (FUSED, PAIR, FEW, DecodePlan("pair", 24)):
                routes = check_hopper.make_routes(tokens, top_k, experts, kind, tokens)
                error = check_hopper.table_error(routes, plan)
                yield f"table {experts} {tokens} {kind} {plan}", not error, error


def hopper_layers(shape: str) -> Callable[[str], Iterator[Check]]:
    return lambda device: check_hopper.layers(shape, (3, 40), ("uniform", "skipped", "none"))


def hopper_compensated(case: str) -> Callable[[str], Iterator[Check]]:
    return lambda device: compare_hopper_compensated.hopper_layers(device, HOPPER, True, (case,))


@dataclass(frozen=True)
class Group:
    """checks: of a device. kernels: those that must be launched."""

    checks: Callable[[str], Iterator[Check]]
    kernels: frozenset[str]


def group(checks: Callable[[str], Iterator[Check]], *kernels: str) -> Group:
    return Group(checks, frozenset(kernels))


# The longest first.
GROUPS = {
    "hopper small": group(hopper_layers("small"), *hopper.KERNELS),
    **{
        f"hopper {case}": group(
            hopper_compensated(case), *hopper.KERNELS, "compensate_rows_kernel"
        )
        for case in ("columns", "columns rac", "rac", "splice", "splice rac")
    },
    "hopper few strips": group(hopper_layers("few strips"), *hopper.KERNELS),
    "compensated linears": group(
        quick(compare_compensated.gemms, compare_compensated.plain_layers),
        "compensate_rows_kernel", "compensated_gemm_kernel",
    ),
    "compensated layers": group(
        quick(compare_compensated.layers, compare_compensated.tiled_layers),
        "compensate_rows_kernel", "compensated_gemm_kernel", "place_routes", "sum_slots",
    ),
    "compensated rows": group(
        quick(compare_compensated_rows.operands), "compensate_rows_kernel"
    ),
    "layers": group(moe_layers, "place_routes", "grouped_gemm_kernel", "sum_slots"),
    "variants": group(quick(compare_variants.variants), "grouped_gemm_kernel", "sum_slots"),
    "rows": group(
        quick(compare_quantize.tokens, compare_quantize.activations), "quantize_rows_kernel"
    ),
    "routes and linears": group(
        routes_and_linears, "count_routes", "place_routes", "grouped_gemm_kernel"
    ),
    "units": group(unit_checks, "take_part_kernel"),
    "weights and edges": group(
        quick(compare_quantize.weights, compare_quantize.weight_storage, compare_edges.edges),
        "weight_amax_kernel", "quantize_weight_kernel", "quantize_rows_kernel",
    ),
    "qat": group(qat_weights, "amax_kernel", "fake_quantize_kernel"),
    "statistics": group(
        quick(compare_statistics.statistics), "measure_rows_kernel", "observe_kernel"
    ),
    "hopper tables": group(hopper_tables, "list_blocks"),
}  # fmt: skip
PLANTED_GROUPS = ("planted", "planted triton")
OURS = frozenset().union(*(g.kernels for g in GROUPS.values())) | PLANTED_NAMES


def note_launches() -> set[str]:
    """The names of all kernels that are launched from now on."""
    seen: set[str] = set()
    kind = triton.runtime.JITFunction
    if os.environ.get("TRITON_INTERPRET") == "1":
        kind = triton.runtime.interpreter.InterpretedFunction
    run, load = kind.run, hopper.load_kernels

    def noting_run(self, *args, **kwargs):
        seen.add(self.fn.__name__)
        return run(self, *args, **kwargs)

    def noting_load(cubin, names, shared):
        kernels = load(cubin, names, shared)
        for name, kernel in kernels.items():
            kernel.launch = noting_launch(name, kernel.launch)
        return kernels

    def noting_launch(name, launch):
        return lambda *args: seen.add(name) or launch(*args)

    kind.run, hopper.load_kernels = noting_run, noting_load
    return seen


def run_part(name: str, device: str) -> int:
    """Run a group's comparisons in this process; the last line says that all was done."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    launched, count, wrong = note_launches(), 0, 0
    for check, ok, text in GROUPS[name].checks(device):
        count, wrong = count + 1, wrong + (not ok)
        if not ok:
            print(f"WRONG {check}: {text}", flush=True)
    if device != "cpu":
        torch.cuda.synchronize()
    if missing := GROUPS[name].kernels - launched:
        print(f"WRONG {name}: not launched: {sorted(missing)}")
        return 1
    print(f"{DONE} {count} comparisons, {wrong} wrong")
    return 1 if wrong or not count else 0


class PlantedArguments(ctypes.Structure):
    _fields_ = (("memory", ctypes.c_void_p), ("count", ctypes.c_int))


def plant(tool: str) -> None:
    memory = torch.empty(64, dtype=torch.int32, device="cuda")
    options = [f"--gpu-architecture={hopper.ARCHITECTURE}", "-std=c++17"]
    cubin = nvrtc.Nvrtc().compile(PLANTED, [], options)
    kernel = nvrtc.load_kernels(cubin, [f"planted_{tool}"], 48 * 1024)[f"planted_{tool}"]
    stream = torch.cuda.current_stream().cuda_stream
    kernel.launch(1, 64, 0, PlantedArguments(memory.data_ptr(), memory.numel()), stream)
    torch.cuda.synchronize()


@triton.jit
def planted_copy(x_ptr, y_ptr, OFFSET: tl.constexpr):
    at = tl.arange(0, 64)
    tl.store(y_ptr + OFFSET + at, tl.load(x_ptr + at))


def plant_triton(tool: str) -> None:
    x, y = (torch.empty(64, dtype=torch.int32, device="cuda") for _ in range(2))
    planted_copy[(1,)](x, y, OFFSET=64 if tool == "memcheck" else 0)
    torch.cuda.synchronize()


def sanitizer_command(tool: str) -> list[str]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).is_file():
        sys.exit("compute-sanitizer is neither in PATH nor in /usr/local/cuda/bin (CUDA toolkit)")
    command = [program, "--tool", tool, "--error-exitcode", "9", "--show-backtrace", "device"]
    command += ["--target-processes", "application-only", "--launch-timeout", "120"]
    command += ["--max-connections", "100", "--print-limit", "1000000"]
    if tool == "memcheck":
        command += ["--padding", "4096", "--report-api-errors", "no"]
    if tool == "initcheck":
        return command
    return command + [part for name in sorted(OURS) for part in ("--kernel-name", f"kne={name}")]


@dataclass(frozen=True)
class Row:
    """A line of the table, and what is printed below it."""

    name: str
    tool: str
    ok: bool
    found: str
    seconds: float
    details: str = ""


def run_task(name: str, tool: str, device: str, limit: float) -> Row:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if tool in ("memcheck", "initcheck"):
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    command = [] if tool == "none" else sanitizer_command(tool)
    command += [sys.executable, __file__, "--part", name, "--device", device, "--tool", tool]
    start = time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it runs
            code = process.wait()
        output.seek(0)
        text = output.read()
    return judge(name, tool, code, text, time.time() - start)


def judge(name: str, tool: str, code: int, text: str, seconds: float) -> Row:
    """What a process's output says of its group. code: its exit status."""
    report = Report(summary=0) if tool == "none" else read_report(text, OURS)
    found = "no summary" if report.summary is None else str(report.errors)
    if report.others:
        found += f" (+ {report.others} elsewhere)"
    if name in PLANTED_GROUPS:
        kernel = f"planted_{tool}" if name == "planted" else "planted_copy"
        ok = report.summary is not None and any(kernel in text for text in report.reports)
        return Row(name, tool, ok, f"{found}, planted", seconds, "" if ok else text[-3000:])
    done = f"\n{DONE}" in f"\n{text}"
    # 9 is the tool's; it may stand for reports of other kernels.
    good = code == 0 or (code == 9 and report.others > 0)
    ok = report.summary is not None and report.errors == 0 and done and good
    details = report.distinct()[:8]
    details += [line for line in text.splitlines() if line.startswith("WRONG ")][:8]
    if not ok and not (done and details):
        lines = [line for line in text.splitlines() if not line.startswith("=========")]
        details.append(f"exit status {code}; the end of the output:\n" + "\n".join(lines[-25:]))
    return Row(name, tool, ok, found, seconds, "\n".join(details))


def tasks_of(tools: list[str], only: list[str], device: str) -> list[tuple[str, str]]:
    """(group, tool): one tool after the other, so that later ones find compiled kernels."""
    if device == "cpu":
        names = [g for g in only or GROUPS if not g.startswith("hopper")]
        return [(name, "none") for name in names]
    planted = [("planted", tool) for tool in tools if tool != "none"]
    planted += [("planted triton", t) for t in tools if t in ("memcheck", "initcheck")]
    return planted + [(name, tool) for tool in tools for name in only or GROUPS]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", nargs="+", choices=[*TOOLS, "none"], default=list(TOOLS))
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=[], metavar="GROUP")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--limit", type=float, default=400, help="seconds for one process")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part in PLANTED_GROUPS:
        (plant if args.part == "planted" else plant_triton)(args.tool[0])
        return 0
    if args.part:
        return run_part(args.part, args.device)
    tasks, rows = tasks_of(args.tool, args.only, args.device), []
    if not tasks:
        parser.error(f"--only {args.only} names no group that runs with --device {args.device}")
    print(f"{'group':<22}{'tool':<11}{'errors':<30}seconds")
    with ThreadPoolExecutor(args.jobs) as pool:
        running = [pool.submit(run_task, *task, args.device, args.limit) for task in tasks]
        for row in (task.result() for task in as_completed(running)):
            rows.append(row)
            mark = "" if row.ok else f"FAILED\n{row.details}\n"
            print(
                f"{row.name:<22}{row.tool:<11}{row.found:<30}{row.seconds:>6.0f} {mark}", flush=True
            )
    failed = sum(not row.ok for row in rows)
    print(f"{failed} of {len(rows)} failed" if failed else f"all {len(rows)} clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
