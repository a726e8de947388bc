"""What ``UnitQuantizer`` hands to the launcher of the installed Triton, without a GPU.

It calls compiled kernels directly, so the order of arguments and the grid are Triton's business and
may change with its version.
"""

from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from quads_common.kernels._units import take_part_kernel
from quads_common.kernels.units import UnitQuantizer
from quads_common.weight_units import Piece


class Launcher:
    """Stands for Triton's: notes what it is called with."""

    calls: list = []  # noqa: RUF012

    def __init__(self, source, metadata):
        self.source, self.metadata = source, metadata

    def __call__(self, *arguments):
        self.calls.append((self, arguments))


class Driver:
    """The parts of Triton's driver that compiling and launching need."""

    launcher_cls = Launcher
    utils = SimpleNamespace(
        unload_module=lambda module: None,
        load_binary=lambda name, kernel, shared, device: (1, 2, 40, 0, 1024),
        get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
    )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def launches(monkeypatch):
    monkeypatch.setattr(Launcher, "calls", [])
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    yield Launcher.calls
    take_part_kernel.device_caches.clear()


def test_units_launch_what_was_compiled(launches):
    packed = torch.zeros((4, 64, 32), dtype=torch.uint8)
    scale = torch.zeros((4, 64, 4), dtype=torch.uint8)
    total = torch.ones(4)
    gpu = UnitQuantizer(packed, scale.view(torch.float8_e4m3fn), total, 2, "te", programs=128)
    first, second = (torch.zeros((32, 64), dtype=torch.bfloat16) for _ in range(2))
    stage = torch.zeros((64, 64), dtype=torch.bfloat16)
    for unit, programs_wait in ((3, False), (2, True), (1, True)):
        full = second if programs_wait else first
        gpu.take(unit, 2, full, Piece(24, 32, 8, 0), stage, programs_wait)
        launcher, (*grid, stream, _, _, _, _, _) = launches[-1][0], launches[-1][1][:9]
        values = dict(zip(launcher.source.fn.arg_names, launches[-1][1][9:], strict=True))
        assert (grid, stream) == ([128, 1, 1], 77)
        assert launcher.metadata.launch_cooperative_grid is programs_wait
        assert launcher.metadata.num_warps == 8
        pointers = {"full_ptr": full, "stage_ptr": stage, "packed_ptr": packed}
        pointers |= {"scale_ptr": scale, "global_ptr": total}
        assert {name: values[name] for name in pointers} == {
            name: tensor.data_ptr() for name, tensor in pointers.items()
        }
        numbers = ("unit", "mask", "first_row", "row_offset", "block_offset")
        assert [values[name] for name in numbers] == [unit, 2, 32, 8, 0]
        assert (values["LAST"], values["PROGRAMS"]) == (programs_wait, 128)
        constants = launcher.source.constants  # what it was compiled with
        names = launcher.source.fn.arg_names
        assert {names[i]: v for (i,), v in constants.items()}.items() <= values.items()
    assert launches[1][0] is launches[2][0]  # compiled once


def test_odd_addresses_are_compiled_apart(launches):
    packed = torch.zeros((1, 16, 16), dtype=torch.uint8)
    scale = torch.zeros((1, 16, 2), dtype=torch.uint8).view(torch.float8_e4m3fn)
    gpu = UnitQuantizer(packed, scale, torch.ones(1), 1, "pow2", programs=64)
    memory = torch.zeros(16 * 32 + 8, dtype=torch.bfloat16)
    for offset, aligned in ((0, True), (1, False), (8, True)):
        full = memory[offset : offset + 16 * 32].view(16, 32)
        assert (full.data_ptr() % 16 == 0) is aligned
        gpu.take(0, 1, full, Piece(16), None, True)
        assert bool(launches[-1][0].source.attrs.get((0,))) is aligned
    assert launches[0][0] is launches[2][0]
