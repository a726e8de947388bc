"""What Triton 3.6 and the newest make of the backend ``blackwell``: sm_100a, sm_103a and sm_120a.

No such GPU was at hand, so this is what is known of the machine code: that it holds the native
block-scaled FP4 instruction and no other in its place, spills nothing, contracts nothing, and fits.
Each Triton compiles in its own process; the newer one's tools read the result of both, since those
of 3.6 do not know sm_103.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton

from tests.kernels.offline import TOOLS

ROOT = Path(__file__).parents[3]
OLD_TRITON = Path(sys.prefix) / "triton-3.6.0"
FP4 = {
    100: "UTCOMMA.4X",
    103: "UTCOMMA.BLOCK16",
    120: "OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X",
}
BF16 = {100: "UTCHMMA", 103: "UTCHMMA", 120: "HMMA.16816.F32.BF16"}
ANY_MMA = re.compile(r"\b((?:UTC\w*MMA|[A-Z]*MMA)(?:\.\w+)*)\s")
# Bytes of shared memory of a multiprocessor; a program may have 1 KiB less.
SHARED = {100: 228 * 1024, 103: 228 * 1024, 120: 100 * 1024}
REGISTERS = 65536
# Programs that must fit into a multiprocessor, by rows of the tile: latency is hidden by others.
PROGRAMS = {16: 2, 32: 2, 64: 1, 128: 1}


@pytest.fixture(scope="module")
def builds(tmp_path_factory):
    """Folder and ``cases.json`` of both Tritons, which compile side by side."""
    assert OLD_TRITON.is_dir(), f"{OLD_TRITON} is missing: run `make setup`"
    running = {}
    for name, path in (("old", [OLD_TRITON]), ("newest", [])):
        folder = tmp_path_factory.mktemp(name)
        path = os.pathsep.join(map(str, [*path, ROOT, ROOT / "common"]))
        command = [sys.executable, "-m", "tests.kernels.blackwell.compile_fp4", str(folder)]
        running[name] = folder, subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    output = {name: process.communicate()[0] for name, (_, process) in running.items()}
    failed = {name: output[name][-4000:] for name, (_, p) in running.items() if p.returncode}
    assert not failed, "\n".join(f"Triton {name}: {text}" for name, text in failed.items())
    folders = {name: folder for name, (folder, _) in running.items()}
    return {n: (f, json.loads((f / "cases.json").read_text())) for n, f in folders.items()}


@pytest.mark.timeout(600)
def test_both_tritons_ran(builds):
    old, newest = (builds[name][1]["triton"] for name in ("old", "newest"))
    assert old == "3.6.0"
    assert newest == triton.__version__
    assert tuple(map(int, newest.split(".")[:2])) >= (3, 9)
    assert builds["old"][1]["cases"].keys() == builds["newest"][1]["cases"].keys()


@pytest.mark.parametrize("which", ["old", "newest"])
def test_machine_code_is_native(builds, which):
    folder, found = builds[which]
    wrong = {}
    for name, code in disassemble(folder, found["cases"]).items():
        capability, multiplied = capability_of(name), set(ANY_MMA.findall(code))
        if found["cases"][name]["target"] != f"sm_{capability}a":
            wrong[name] = found["cases"][name]["target"]
        else:
            spliced = "dequant" in name or "bf16" in name
            wanted = {FP4[capability]} | ({BF16[capability]} if spliced else set())
            # Rows of 720 codes do not begin at multiples of 16 bytes.
            wide = "LDGSTS.E.BYPASS.128" in code or name.endswith("720")
            if multiplied != wanted or not wide:
                wrong[name] = multiplied, wide
    assert not wrong


@pytest.mark.parametrize("which", ["old", "newest"])
def test_launched_layers_are_native(builds, which):
    """GEMMs of a plain layer, of one with RAC and splice, of one with ``act="bf16"``: 2 each."""
    folder = builds[which][0]
    for path in folder.glob("* launched *.cubin"):
        stack = int(re.search(r" STACK:(\d+) ", tool("cuobjdump", "-res-usage", path))[1])
        # Four registers of backend triton's GEMM, on sm_120 with Triton 3.9.
        assert stack <= (16 if "grouped_gemm_kernel" in path.stem else 0), path.stem
    names = [path.stem for path in folder.glob("* launched grouped_*.cubin")]
    names.sort(key=lambda name: (capability_of(name), int(name.split()[-1])))
    assert [capability_of(name) for name in names] == [100] * 6 + [120] * 6
    code = disassemble(folder, names)
    for i, name in enumerate(names):
        capability, multiplied = capability_of(name), set(ANY_MMA.findall(code[name]))
        fp4, bf16 = {FP4[capability]}, {BF16[capability]}
        if i % 6 < 4:
            assert multiplied == (fp4 if i % 6 < 2 else fp4 | bf16), name
            assert "LDGSTS.E.BYPASS.128" in code[name], name
        else:
            assert multiplied and not multiplied & fp4, name


@pytest.mark.parametrize("which", ["old", "newest"])
def test_nothing_spills_or_is_contracted(builds, which):
    wrong = {}
    for name, case in builds[which][1]["cases"].items():
        tile, shared = int(name.split()[3]), SHARED[capability_of(name)]
        programs = min(
            REGISTERS // (case["registers"] * case["threads"]), shared // (case["shared"] + 1024)
        )
        if case["stack"] or case["contracted"] or programs < PROGRAMS[tile]:
            wrong[name] = case
    assert not wrong


def capability_of(name: str) -> int:
    return int(re.match(r"sm_(\d+) ", name)[1])


def disassemble(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Machine code by name."""

    def one(name: str) -> str:
        return tool("nvdisasm", "-c", "-ndf", folder / f"{name}.cubin")

    names = list(names)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))


def tool(name: str, *arguments: str | Path) -> str:
    command = [str(TOOLS / name), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
