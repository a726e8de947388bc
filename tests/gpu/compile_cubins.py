"""Compiles the CUDA C++ kernels of the GPU checks and benchmarks on a machine without a GPU.

    PYTHONPATH=common:. python tests/gpu/compile_cubins.py FOLDER --jobs 2

Takes about ten seconds of CPU time for each. On the GPU machine, with the same version of NVRTC and
of the sources, ``QUADS_KERNEL_CACHE=FOLDER`` finds them; otherwise they are compiled there again.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from quads_common.kernels.cuda.cubin_cache import CACHE_VARIABLE
from quads_common.kernels.cuda.nvrtc import compile_cubin
from quads_common.kernels.hopper import ARCHITECTURE, moe_defines
from quads_common.kernels.hopper_columns import NO_COLUMNS, Counts
from tests.gpu.check_hopper import SHAPES
from tests.kernels.compare_hopper_compensated import CASES, COLUMN_CASES
from tests.kernels.compensated_cases import Preset

# Dtype of the operands, H, I, inspection, RAC, splice, columns: of ``moe_defines``.
Kernels = tuple[torch.dtype, int, int, bool, bool, bool, Counts]
FP16, BF16 = torch.float16, torch.bfloat16
# What the presets and ``bench_compensation.py`` run: RAC, splice, columns.
SERVED = [(rac, splice, NO_COLUMNS) for rac in (False, True) for splice in (False, True)]
SERVED += [(False, True, (64, 32)), (True, True, (64, 32))]


def compared(presets: tuple[Preset, Preset]) -> tuple[bool, bool, Counts]:
    first, second = (p.channels if p.columns else 0 for p in presets)
    return presets[1].ratio is not None, presets[1].channels > 0, (first, second)


def wanted() -> list[Kernels]:
    """The longest lists first: what every script shares, then each shape's comparisons."""
    found = [(FP16, *SHAPES["qwen3-30b-a3b"][:2], False, *served) for served in SERVED]
    found.append((FP16, 128, 128, True, False, False, NO_COLUMNS))  # block tables
    for hidden, inner, *_ in SHAPES.values():
        cases = {compared(presets) for presets in (CASES | COLUMN_CASES).values()}
        for inspect in (False, True):
            found += [(dtype, hidden, inner, inspect, False, False, NO_COLUMNS)
                      for dtype in (FP16, BF16)]  # fmt: skip
            if inner != 128 or hidden != 128:  # "few strips" is compared without compensation
                found += [(FP16, hidden, inner, inspect, *case) for case in sorted(cases)]
    return list(dict.fromkeys(found))


def build(kernels: Kernels) -> Kernels:
    compile_cubin("moe", ARCHITECTURE, moe_defines(*kernels))
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    os.environ[CACHE_VARIABLE] = str(args.folder.resolve())
    with ProcessPoolExecutor(args.jobs) as pool:
        for kernels in pool.map(build, wanted()):
            print(*kernels, flush=True)


if __name__ == "__main__":
    main()
