"""Shared memory and limits: what the host computes is what the CUDA C++ kernels address.

NVRTC's front end alone, which checks the kernels' static assertions and makes no code.
"""

import pytest
import torch

from quads_common.kernels import hopper, hopper_memory
from quads_common.kernels.cuda import nvrtc
from quads_common.kernels.hopper import moe_defines
from tests.kernels.test_hopper import SHAPES, needs_nvrtc

pytestmark = needs_nvrtc

# Planes that are padded, and K in 1, 2, 3 and 4 parts.
ALL_SHAPES = [*SHAPES, (128, 128), (640, 256), (384, 640), (1280, 2304)]


def check(shape, columns=(0, 0), dtype=torch.float16, **changed) -> None:
    """Raises ``RuntimeError`` with the compiler's messages."""
    defines = moe_defines(dtype, *shape, False, True, dtype == torch.float16, columns) | changed
    options = ["--gpu-architecture=sm_90a", "-std=c++17", "-default-device"]
    options += ["-fdevice-syntax-only", *(f"-D{key}={value}" for key, value in defines.items())]
    headers = sorted(nvrtc.SOURCES.glob("*.cuh"))
    nvrtc.Nvrtc().compile(nvrtc.SOURCES / "moe.cu", headers, options)


@pytest.mark.parametrize("shape", ALL_SHAPES, ids=str)
def test_layouts_are_those_of_the_kernels(shape):
    for columns in ((0, 0), (16, 128), (64, 32), (48, 80)):
        check(shape, columns)
    check(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "name, offset, message",
    [
        ("X_ROW", 128, "the host knows another X_ROW"),
        ("X_ROW", -32, "the host knows another X_ROW"),
        ("X_ROW", 32, "the host knows another X_ROW"),
        ("PRODUCT_ROW", 128, "the host knows another PRODUCT_ROW"),
        ("PRODUCT_ROW", -128, "the host knows another PRODUCT_ROW"),
        ("LIST_BYTES", -16, "room for two lists"),
        ("UP_PARTS", 1, "parts of K are whole stages"),
        ("DOWN_PARTS", 1, "parts of K are whole stages"),
        ("UP_COPY_BYTES", -64, "room for copies of columns"),
        ("DOWN_COPY_BYTES", 64, "room for copies of columns"),
        ("WARPS", -8, "a thread places an expert"),
        ("MAX_EXPERTS", 512, "a thread places an expert"),
        ("MAX_ROWS", 8, "1 to 4 groups of 8 slots"),
        ("MAX_SLOTS", 1 << 16, "both are kept in 16 bits"),
        ("FEW_SLOTS", 1, "a lane has a slot"),
        ("FEW_ROWS", 4, "in groups of 8"),
        ("COLUMN_STEP", -8, "see ColumnPart"),
        ("MAX_COLUMNS", 16, "at most twice 64"),
        ("MAX_COLUMNS", -80, "COLUMNS13 <= "),
    ],
)
def test_other_numbers_do_not_compile(name, offset, message):
    defines = moe_defines(torch.float16, *SHAPES[0], False, True, True, (64, 32))
    check(SHAPES[0], (64, 32))
    with pytest.raises(RuntimeError, match=message):
        check(SHAPES[0], (64, 32), **{name: str(int(defines[name]) + offset)})


@pytest.mark.parametrize(
    "columns, message",
    [((24, 0), "COLUMNS13 % "), ((-16, 0), "COLUMNS13 >= 0"), ((0, 144), "COLUMNS2 <= ")],
)
def test_counts_of_columns_that_do_not_compile(columns, message):
    counts = dict(zip(("COLUMNS13", "COLUMNS2"), map(str, columns), strict=True))
    with pytest.raises(RuntimeError, match=message):
        check(SHAPES[0], **counts)


def test_parts_of_k():
    assert [hopper_memory.parts(128 * n) for n in range(1, 13)] == [
        1, 2, 3, 4, 1, 3, 1, 4, 3, 2, 1, 4,
    ]  # fmt: skip


def test_limits():
    """Stated once, by the host, so only this notices that one changes."""
    assert (hopper.MAX_ROWS, hopper.MAX_EXPERTS, hopper.MAX_SLOTS) == (32, 512, 4096)
    assert (hopper.MAX_SPARES, hopper.THREADS, hopper.FEW_SLOTS) == (12, 512, 32)
