"""BF16 columns in the CUDA C++ kernels, without a GPU.

The sum over columns of ``cuda/columns.cuh``, compiled for this machine with the tensor cores'
instruction in C++ (``cuda_host/columns.cpp``); what NVRTC makes of the kernels; the arguments that
they take. Layers are compared on a GPU: ``tests/gpu/check_compensation_kernels.py``.
"""

import ctypes
import itertools
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from quads_common.activation import Activation
from quads_common.compensation.operands import InputCompensation
from quads_common.kernels import cuda, hopper
from quads_common.kernels.cuda import nvrtc
from quads_common.kernels.cuda.cubin_cache import CACHE_VARIABLE
from quads_common.kernels.hopper import decode_plan, moe_defines, why_not_hopper
from quads_common.kernels.hopper_columns import HotColumns, column_counts, hot_columns
from quads_common.kernels.hopper_memory import (
    ALL_SHARED,
    FEW_SHARED,
    SHARED,
    launches,
    row_bytes,
)
from quads_common.weight_tiles import TileLayout
from tests.kernels.offline import cuobjdump
from tests.kernels.test_hopper import SHAPES, needs_nvrtc

FOLDER = cuda.__path__[0]
CPU = torch.device("cpu")


# Bytes of a thread's stack, with an odd number of stages of 128 (docs/performance.md).
SPILLED = {(4096, 384): {"moe_down": 8}}


@needs_nvrtc
@pytest.mark.parametrize("shape, rac", [(SHAPES[0], False), (SHAPES[1], True)], ids=str)
def test_what_kernels_with_columns_take(tmp_path, monkeypatch, shape, rac):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    defines = moe_defines(torch.float16, *shape, False, rac, True, (64, 32))
    cubin = nvrtc.compile_cubin("moe", "sm_90a", defines)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
        cuobjdump(cubin, "-res-usage"),
    )
    assert {name for name, *_ in usage} == set(hopper.KERNELS)
    for name, registers, stack, shared, local in usage:
        allowed = SPILLED.get(tuple(shape), {}).get(name, 0)
        assert int(stack) <= allowed and local == "0", name
        assert int(registers) <= 128, name
        of_rows = FEW_SHARED if name.endswith("_few") else SHARED
        assert int(shared) + of_rows <= ALL_SHARED, name
    sass = cuobjdump(cubin, "-sass")
    assert set(re.findall(r"HMMA[.\w]*", sass)) == {"HMMA.16816.F32", "HMMA.16816.F32.BF16"}


@pytest.mark.parametrize(
    "first, count, columns",
    [(0, 16, 16), (0, 32, 32), (0, 48, 48), (0, 64, 64), (16, 16, 32), (48, 48, 96), (64, 16, 80)],
)
@pytest.mark.parametrize("gate_up", [True, False])
def test_sum_over_columns(tmp_path, first, count, columns, gate_up):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    source = __file__.replace("test_cuda_columns.py", "cuda_host/columns.cpp")
    command = [
        "g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas",
        f"-I{FOLDER}", f"-DCOLUMN_COUNT={count}", f"-DALL_COLUMNS={columns}",
        f"-DFIRST_COLUMN={first}", "-DSTRIPS_OF_EXPERT=3", source, "-o", f"{tmp_path}/columns.so",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    generator = torch.Generator().manual_seed(count)
    # Small integers: sums are exact in any order.
    weight, hot = (
        torch.randint(-8, 9, (*rows, columns), generator=generator).bfloat16()
        for rows in ((2, 96), (16,))
    )
    tiled = TileLayout(gate_up).tile_columns(weight)
    shared = torch.nn.functional.pad(hot, (0, 16), value=torch.nan).flatten()
    shared = torch.cat((shared, torch.full((32 * columns,), torch.nan).bfloat16()))
    mine = slice(first, first + count)
    sums = weight[..., mine].float() @ hot[:, mine].float().T
    # The places of strips: see ``weight_tiles``.
    if gate_up:
        places = sums.unflatten(1, (2, 3, 16)).transpose(1, 2).reshape(2, 3, 32, 16)
    else:
        places = sums.unflatten(1, (3, 8, 4)).transpose(2, 3).reshape(2, 3, 32, 16)
    run = ctypes.CDLL(f"{tmp_path}/columns.so")
    for expert, strip, copied in itertools.product(range(2), range(3), (False, True)):
        y = torch.full((32, 16), torch.nan)
        source, values, sums_at = (ctypes.c_void_p(t.data_ptr()) for t in (tiled, shared, y))
        run.multiply(source, expert, strip, values, sums_at, copied)
        assert torch.equal(y, places[expert, strip])


@pytest.mark.parametrize("columns", [(64, 32), (16, 0), (0, 128), (128, 128), (48, 80)], ids=str)
@pytest.mark.parametrize("hidden, inner", [*SHAPES, (128, 128), (6144, 768), (8192, 8192)], ids=str)
@pytest.mark.parametrize("tokens", [1, 33, 100, 4096])
def test_rows_with_columns_fit_in_shared_memory(tokens, hidden, inner, columns):
    up, down = row_bytes(hidden, inner, columns)
    padded = -(-hidden // 256) * 256  # 8 planes of 32
    for row, operand, count in ((up, 2 * padded, columns[0]), (down, 2 * inner, columns[1])):
        assert 0 <= row - (operand + 2 * count) <= 32
        assert row % 128 in (32, 96)  # 16-byte copies; banks
    assert why_not_hopper(8, hidden, inner, Activation(), columns) is None
    plan = decode_plan(tokens, 2, 8, hidden, inner, 132, columns)
    if plan is None:
        return
    free = FEW_SHARED if plan.form == "few" else SHARED
    for launch in launches(plan.form, plan.rows, hidden, inner, columns):
        assert plan.rows <= launch.rows
        assert launch.shared <= free
        # Rows, then lists, as the kernels address them, then copies.
        fused, gemm1 = plan.form == "fused", "up" in launch.kernel
        row = up + down if fused else up if gemm1 else down
        lists = 0 if gemm1 else 2 * 5 * inner // 16
        assert launch.buffer == launch.rows * row + lists
        assert launch.buffer % 16 == 0
        copies = 0
        if plan.form == "few":
            stages, count = (hidden, columns[0]) if gemm1 else (inner, columns[1])
            sharing = max(p for p in (1, 2, 3, 4) if stages // 128 % p == 0)
            copies = (16 // sharing) * 32 * 2 * count * (sharing > 1)
        assert launch.shared == launch.buffer + copies


@pytest.mark.parametrize(
    "columns, reason",
    [
        ((64, 32), None),
        ((0, 0), None),
        ((20, 32), r"20 BF16 columns of w13 \(multiples of 16 from 0 to 128\)"),
        ((-16, 0), "-16 BF16 columns of w13"),
        ((64, 144), "144 BF16 columns of w2"),
    ],
)
def test_counts_that_fit(columns, reason):
    found = why_not_hopper(128, 2048, 768, Activation(), columns)
    assert found is None if reason is None else re.search(reason, found)


def test_columns_of_a_layer():
    first = InputCompensation(None, torch.zeros((1, 16), dtype=torch.int32), bf16(2, 8, 16))
    second = InputCompensation(None, torch.zeros((2, 32), dtype=torch.int32), bf16(2, 4, 32))
    folded = replace(second, columns=None)
    nothing = InputCompensation(None, torch.zeros((2, 0), dtype=torch.int32), bf16(2, 4, 0))
    assert column_counts(first, second) == (16, 32)
    assert column_counts(folded, nothing) == (0, 0)
    assert hot_columns(folded, None, nothing) is None
    only_first = hot_columns(first, bf16(3, 16), folded)
    assert only_first.counts == (16, 0)
    assert only_first.channels is None
    only_second = hot_columns(nothing, bf16(3, 0), second)
    assert only_second.counts == (0, 32)
    only_second.check(3, 2, 4, 4, CPU)


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"w13": bf16(2, 8, 20)}, "20 BF16 columns of w13"),
        ({"w13": bf16(1, 8, 16)}, r"w13 columns must be torch.bfloat16 \[2, 8, 16\]"),
        ({"hot": bf16(2, 16)}, r"hot must be torch.bfloat16 \[3, 16\]"),
        ({"hot": None}, "need the values or the channels"),
        ({"channels": None}, "need the values or the channels"),
        ({"channels": torch.zeros((3, 32), dtype=torch.int32)}, "need the values or the channels"),
        ({"channels": torch.zeros((2, 32), dtype=torch.int64)}, "channels must be torch.int32"),
        ({"w2": bf16(2, 32, 4).transpose(1, 2)}, "w2 columns must be .* contiguous"),
        ({"w13": bf16(2, 8, 16).to("meta")}, "w13 columns must be .* on cpu, got .* on meta"),
        ({"w2": bf16(257)[1:].view(2, 4, 32)}, "must start at a multiple of 16 bytes"),
    ],
)
def test_arguments_that_are_refused(changed, message):
    good = HotColumns(
        bf16(2, 8, 16), bf16(3, 16), bf16(2, 4, 32), torch.zeros((2, 32), dtype=torch.int32)
    )
    good.check(3, 2, 4, 4, CPU)
    with pytest.raises(ValueError, match=message):
        replace(good, **changed).check(3, 2, 4, 4, CPU)
