"""What ``tests/gpu/sanitize_kernels.py`` makes of a sanitizer's output, and what it runs."""

import ast
import re
from pathlib import Path

import pytest

from quads_common import kernels, qat
from quads_common.kernels import hopper
from quads_common.kernels.cuda import nvrtc
from tests.gpu import sanitize_kernels
from tests.gpu.sanitize_kernels import DONE, GROUPS, PLANTED, PLANTED_NAMES, judge
from tests.kernels.offline import cuobjdump
from tests.kernels.sanitizer_report import read_report
from tests.kernels.test_hopper import needs_nvrtc

FIRST = "========= COMPUTE-SANITIZER\n"
CLEAN = "========= ERROR SUMMARY: 0 errors\n"
NO_RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
PASSED = f"{DONE} 3 comparisons, 0 wrong\n"
# In the forms that NVIDIA's manual shows; two threads of one access.
WRITE = "".join(
    f"""========= Invalid __global__ write of size 4 bytes
=========     at sum_slots+0x1b0 in _route.py:117
=========     by thread ({thread},0,0) in block (0,0,0)
=========     Address 0x7f24bc8002{thread}0 is out of bounds
=========     and is 33 bytes after the nearest allocation at 0x7f24bc800000 of size 512 bytes
=========
"""
    for thread in (1, 2)
)
RACE = """========= Error: Race reported between Write access at moe_up+0x90 in moe.cu:41
=========     and Read access at moe_up+0x100 in moe.cu:51 [508 hazards]
=========
"""
READ = """========= Uninitialized __global__ memory read of size 2 bytes
=========     at {}+0x70
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
"""
TORCH = "void at::native::unrolled_elementwise_kernel<at::native::sum_slots_like>(int, T1)"
BARRIER = """========= Barrier error detected. Divergent thread(s) in block.
=========     at 0x11f0 in place_routes
=========     by thread (32,0,0) in block (0,0,0)
=========
"""
NOT_PRINTED = "========= ERROR SUMMARY: 7 errors were not printed. Use --print-limit option\n"
COPY = "========= Host API uninitialized memory access at 0x7f00 on access by cudaMemcpy source\n"
INVALID_COPY = "========= Host API memory access error at host access to 0x7f00 of size 8 bytes\n"
SOURCE = """=========     Uninitialized access to 0x7f0080 on access by cudaMemcpy source
=========
"""
UNTRACKED = "========= Internal Sanitizer Error: The Sanitizer didn't track the launch.\n"


def summary(count):
    return f"========= ERROR SUMMARY: {count} error{'s' if count != 1 else ''}\n"


# output, what the summary says, ours, of other kernels, distinct
@pytest.mark.parametrize(
    "text, found",
    [
        (CLEAN, (0, 0, 0, 0)),
        (NO_RACE, (0, 0, 0, 0)),
        ("", (None, 0, 0, 0)),
        (WRITE, (None, 2, 0, 1)),
        (WRITE + summary(2), (2, 2, 0, 1)),
        (WRITE + summary(9) + NOT_PRINTED, (9, 9, 0, 1)),
        (BARRIER + summary(1), (1, 1, 0, 1)),
        (
            RACE + "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n",
            (1, 1, 0, 1),
        ),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 2 warnings)\n", (2, 2, 0, 0)),
        (READ.format("quantize_rows_kernel") + READ.format(TORCH) + summary(2), (2, 1, 1, 1)),
        (READ.format(TORCH) + summary(1), (1, 0, 1, 0)),
        (COPY + summary(1), (1, 0, 1, 0)),
        (INVALID_COPY + summary(1), (1, 1, 0, 1)),
        (INVALID_COPY + SOURCE + summary(1), (1, 0, 1, 0)),
        (INVALID_COPY + SOURCE.replace("source", "destination"), (None, 1, 0, 1)),
        (UNTRACKED + CLEAN, (0, 1, 0, 1)),
        ("========= Target application returned an error\n" + CLEAN, (0, 0, 0, 0)),
    ],
)
def test_reports_are_counted(text, found):
    report = read_report(FIRST + "a line of the program\n" + text, sanitize_kernels.OURS)
    distinct = report.distinct()
    assert (report.summary, report.errors, report.others, len(distinct)) == found


def test_reports_are_shown_whole():
    report = read_report(FIRST + WRITE + summary(2), sanitize_kernels.OURS)
    (text,) = report.distinct()
    assert text.startswith("Invalid __global__ write of size 4 bytes\n    at sum_slots+0x1b0")
    assert "33 bytes after the nearest allocation" in text


FOREIGN = READ.format(TORCH) + summary(1)


@pytest.mark.parametrize(
    "tool, code, text, ok",
    [
        ("memcheck", 0, PASSED + CLEAN, True),
        ("none", 0, PASSED, True),
        ("memcheck", 0, PASSED, False),  # the tool did not finish
        ("memcheck", 0, CLEAN, False),  # the group did not
        ("memcheck", 1, PASSED + CLEAN, False),
        ("memcheck", 9, PASSED + CLEAN, False),
        ("memcheck", 9, PASSED + WRITE + summary(2), False),
        ("memcheck", 0, PASSED + WRITE + summary(2), False),
        ("racecheck", 0, PASSED + RACE + NO_RACE, False),
        ("initcheck", 9, PASSED + FOREIGN, True),
        ("initcheck", 1, PASSED + FOREIGN, False),
        ("none", 1, "WRONG a: b\n" + PASSED, False),
        ("none", -9, "", False),
    ],
)
def test_groups_are_judged(tool, code, text, ok):
    row = judge("layers", tool, code, text, 1.0)
    assert row.ok is ok
    assert bool(row.details) is not ok


def test_planted_errors_must_be_found():
    clean = judge("planted", "memcheck", 0, FIRST + CLEAN, 1.0)
    other = judge("planted", "memcheck", 9, FIRST + WRITE + summary(2), 1.0)
    found = WRITE.replace("sum_slots", "planted_memcheck") + summary(2)
    assert not clean.ok and not other.ok
    assert judge("planted", "memcheck", 9, FIRST + found, 1.0).ok


@needs_nvrtc
def test_planted_kernels_compile():
    """With the shared array and both barriers still in."""
    options = [f"--gpu-architecture={hopper.ARCHITECTURE}", "-std=c++17"]
    sass = cuobjdump(nvrtc.Nvrtc().compile(PLANTED, [], options), "-sass")
    found = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", sass, re.S))
    assert set(found) == PLANTED_NAMES - {"planted_copy"}
    assert "LDS" in found["planted_racecheck"] and "STS" in found["planted_racecheck"]
    assert "LDG" in found["planted_initcheck"] and "STG" in found["planted_memcheck"]
    assert "WARPSYNC" in found["planted_synccheck"] and "BAR.SYNC" in found["planted_synccheck"]


def test_every_kernel_is_in_a_group():
    """Functions that Triton compiles and no other such function calls; those of moe.cu."""
    compiled, called = set(), set()
    for package in (kernels, qat):
        for file in Path(package.__path__[0]).glob("_*.py"):
            for function in ast.parse(file.read_text()).body:
                if isinstance(function, ast.FunctionDef) and function.decorator_list:
                    assert "triton.jit" in ast.unparse(function.decorator_list[0])
                    compiled.add(function.name)
                    called |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    names = (compiled - called) | {*hopper.KERNELS, "list_blocks"}
    assert names == set().union(*(group.kernels for group in GROUPS.values()))
