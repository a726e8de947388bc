"""The quantizer of ``cuda/compensate.cuh``, compiled for this machine, against ``fold``: bits.

The arithmetic is the header's own text, and so is that of ``device.cuh`` behind its last heading;
what a GPU has and a CPU has not stands in ``cuda_host/compensate.cpp``.
"""

import ctypes
import re
import shutil
import subprocess
from dataclasses import replace

import pytest
import torch

from quads_common import format as contract
from quads_common.compensation.fold import fold
from quads_common.compensation.operands import InputCompensation, compensated_operands
from quads_common.kernels import cuda, hopper
from quads_common.kernels.cuda import nvrtc
from quads_common.kernels.cuda.cubin_cache import CACHE_VARIABLE
from quads_common.kernels.hopper import moe_defines
from tests.common.bits import assert_same_bits
from tests.kernels.compensated_cases import Preset, enlarge_hot, hot_rows
from tests.kernels.offline import cuobjdump
from tests.kernels.shifted_rows import shifted_rows, shifts_of
from tests.kernels.test_hopper import needs_nvrtc

FOLDER = cuda.__path__[0]
WIDTHS = (128, 768)
HEADING = "// ---- the quantizer of `quads_common.quantize`"


@needs_nvrtc
def test_kernels_that_compensate_do_not_spill(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    defines = moe_defines(torch.float16, 2048, 768, False, True, True)
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+)",
        cuobjdump(nvrtc.compile_cubin("moe", "sm_90a", defines), "-res-usage"),
    )
    assert {name for name, *_ in usage} == set(hopper.KERNELS)
    assert all(int(registers) <= 128 and stack == "0" for _, registers, stack in usage), usage


@pytest.fixture(scope="module", params=WIDTHS)
def library(request, tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("cuda")
    with open(f"{FOLDER}/device.cuh") as file:
        _, heading, quantizer = file.read().partition(HEADING)
    assert heading
    (folder / "quantizer.cuh").write_text(heading + quantizer)
    names = ("AMAX_FLOOR", "FLT_MAX", "ONE_SIXTH")
    defines = [f"-D{name}={float(getattr(contract, name)).hex()}f" for name in names]
    command = [
        "g++", "-std=c++20", "-O1", "-ffp-contract=off", "-mf16c", "-shared", "-fPIC", "-pthread",
        "-Wno-unknown-pragmas", f"-I{FOLDER}", f"-DK_BLOCKS={request.param // 16}", *defines,
        f'-DQUANTIZER="{folder}/quantizer.cuh"', __file__.replace(
            "test_cuda_compensate.py", "cuda_host/compensate.cpp"
        ), "-o", f"{folder}/compensate.so",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(f"{folder}/compensate.so"), request.param


def in_planes(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (-1, 8)).transpose(1, 2).contiguous()


def test_rows_are_kept_in_order(library):
    """From planes, as the kernels hold them, to the order of the statistics."""
    run, width = library
    x = torch.randn((3, width), generator=torch.Generator().manual_seed(2)).bfloat16()
    planes, got = in_planes(x), torch.zeros_like(x)
    run.in_order(ctypes.c_void_p(planes.data_ptr()), ctypes.c_void_p(got.data_ptr()), len(x))
    assert_same_bits(got, x, f"{width}")


def test_hot_values_are_gathered(library):
    run, width = library
    x = torch.randn((5, width), generator=torch.Generator().manual_seed(3)).bfloat16()
    channels = Preset(None, 32, True).lists(width, len(x), 1, "cpu").channels
    planes, got = in_planes(x), torch.full((len(x), 32), torch.nan, dtype=x.dtype)
    pointers = (ctypes.c_void_p(t.data_ptr()) for t in (channels, got))
    run.gather(ctypes.c_void_p(planes.data_ptr()), len(x), *pointers)
    want = torch.where(channels >= 0, x.gather(1, channels.clamp(min=0).long()), 0)
    assert_same_bits(got, want, f"{width}")


def compensate(run, x: torch.Tensor, split: int, lists: InputCompensation, lanes: int):
    """float16 values in planes and row scales; rows from ``split`` on have the second lists."""
    values, scales = in_planes(x).view(torch.int16), torch.zeros(len(x))
    mask, bits = lists.block_mask, lists.hot_bits
    run.compensate(
        ctypes.c_void_p(values.data_ptr()), ctypes.c_void_p(scales.data_ptr()), len(x), split,
        ctypes.c_void_p(None if mask is None else mask.data_ptr()),
        ctypes.c_void_p(None if bits is None else bits.data_ptr()),
        ctypes.c_float(lists.alpha), mask is not None, bits is not None,
        lists.columns is not None, lanes,
    )  # fmt: skip
    return values.view(torch.float16), scales


@pytest.mark.parametrize("lanes", [1, 2, 4])
@pytest.mark.parametrize(
    "preset",
    [
        None,
        Preset(0.5),
        Preset(1.0, alpha=0.5),
        Preset(channels=32),
        Preset(0.5, 32),
        Preset(0.0, 5),
        Preset(None, 32, True),
        Preset(0.5, 32, True),
    ],
    ids=[
        "plain", "rac", "rac-alpha", "splice", "splice-rac", "nothing-selected", "columns",
        "columns-rac",
    ],
)  # fmt: skip
def test_rows_equal_torch(library, preset, lanes):
    """Rows of two experts at a time, also none of the second, and with bad rows among them."""
    run, width = library
    lists = preset.lists(width, 2, 4, "cpu") if preset else InputCompensation()
    for count, split in ((1, 1), (2, 1), (24, 24), (13, 8)):
        x = hot_rows(count, width, torch.Generator().manual_seed(41), torch.bfloat16)
        of_row = (torch.arange(count) >= split).long()
        if lists.channels is not None:
            enlarge_hot(x, lists.channels, of_row)
        if count > 6:
            x[-1, 7], x[-2, 9] = torch.nan, -torch.inf
            if lists.channels is not None:
                x[5, lists.channels[0, 1]] = torch.inf
        values, scales = compensate(run, x, split, lists, lanes)
        for group in of_row.unique().tolist():
            mine = of_row == group
            operands = compensated_operands(x[mine], replace(lists, columns=None), group)
            if lists.columns is not None:
                operands = replace(operands, hot=None, channels=None)
            want = fold(operands)
            got = values[mine]
            what = f"{width}, {count} rows, expert {group}"
            assert_same_bits(got + 0.0, in_planes(want.values) + 0.0, what)
            assert_same_bits(scales[mine], want.row_scale.flatten(), what)


@pytest.mark.parametrize("rac", [None, 0.5])
def test_largest_shifts_equal_torch(library, rac):
    run, width = library
    lists = Preset(rac, 32).lists(width, 1, 4, "cpu")
    x = shifted_rows(width, lists)
    assert shifts_of(x, lists) == [120, 121, 122, 123, 124, 125, 126, 126]
    values, scales = compensate(run, x, len(x), lists, 2)
    want = fold(compensated_operands(x, lists))
    assert_same_bits(values + 0.0, in_planes(want.values) + 0.0, f"{width}")
    assert_same_bits(scales, want.row_scale.flatten(), f"{width}")
