"""Launches a whole layer on a GPU that is not there: what Triton's launcher makes of the arguments.

``compile_kernel`` states the types of arguments; here they come from the tensors, as in service. A
driver that pretends to be a GPU takes the machine code and launches nothing; it stays in force, so
this is for a process of its own.
"""

import re
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quads_common.compensation.operands import InputCompensation, channel_bits
from quads_common.kernels import _compensated, _quantize, _route
from quads_common.kernels import _gemm as _triton_gemm
from quads_common.kernels.blackwell import _gemm
from quads_common.kernels.blackwell.moe import fused_moe_blackwell
from tests.kernels.exact import random_rows, random_weight

# Qwen3-30B-A3B's layer, with fewer experts.
EXPERTS, HIDDEN, INNER = 4, 2048, 768


class Launcher:
    """Stands for Triton's: takes everything and does nothing."""

    def __init__(self, source, metadata):
        pass

    def __call__(self, *arguments):
        pass


class Driver:
    """The parts of Triton's driver that compiling and launching need; keeps the machine code."""

    launcher_cls = Launcher

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.loaded: list[tuple[str, bytes]] = []
        self.utils = SimpleNamespace(
            unload_module=lambda module: None,
            load_binary=self.load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 99 * 1024},
        )

    def load_binary(self, name, binary, shared, device):
        self.loaded.append((name, binary))
        return 1, 2, 40, 0, 1024

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 77

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)


def launched(capability: int) -> dict[str, bytes]:
    """Machine code by ``sm_<capability> launched <kernel> <number>`` of three MoE layers."""
    driver = Driver(capability)
    # It stays: kernels ask for it when they are deleted.
    triton.runtime.driver.set_active(driver)
    run_layers()
    for module in (_compensated, _quantize, _route, _gemm, _triton_gemm):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()  # of device 0, which is another GPU next time
    return {
        f"sm_{capability} launched {re.sub(r'_?0d.*', '', name)} {i}": binary
        for i, (name, binary) in enumerate(driver.loaded)
    }


def run_layers() -> None:
    """Plain; with RAC and splice, columns of the FP4 weight for w13, BF16 ones for w2; W4A16."""
    generator = torch.Generator().manual_seed(0)
    w13 = random_weight(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    w2 = random_weight(EXPERTS, HIDDEN, INNER, generator=generator)
    x = random_rows(3, HIDDEN, generator=generator)
    ids = torch.tensor([[0, 3], [1, 2], [2, 0]], dtype=torch.int32)
    router = torch.rand((3, 2), generator=generator)
    fused_moe_blackwell(x, w13, w2, router, ids)
    channels = torch.arange(64, dtype=torch.int32).repeat(EXPERTS, 1)
    masks = torch.ones((EXPERTS, INNER // 16), dtype=torch.bool)
    columns = torch.zeros((EXPERTS, HIDDEN, 32), dtype=torch.bfloat16)
    fused_moe_blackwell(
        x, w13, w2, router, ids,
        w13_input=InputCompensation(
            torch.ones((1, HIDDEN // 16), dtype=torch.bool), channels[:1],
            hot_bits=channel_bits(channels[:1], HIDDEN),
        ),
        w2_input=InputCompensation(
            masks, channels[:, :32].contiguous(), columns,
            hot_bits=channel_bits(channels[:, :32], INNER),
        ),
    )  # fmt: skip
    fused_moe_blackwell(x, w13, w2, router, ids, act="bf16")
