"""A CPU as verl's platform, set through its own plug-in point (``verl.plugin.platform``).

Without it verl falls back to ``torch.cuda``. Nothing of verl is replaced, with one exception:
verl's FSDP engine looks for a class that TRL 1.16 (in the same environment here) no longer has.
"""

import os
from types import SimpleNamespace
from typing import Any

__all__ = ["use_cpu"]


def use_cpu(port: int) -> None:
    """Make this process a verl worker on a CPU: platform, and a process group of one."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import verl.models.transformers.monkey_patch as monkey_patch
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    def nothing(*_: Any, **__: Any) -> None:
        return None

    def zero(*_: Any) -> int:
        return 0

    device = SimpleNamespace(
        synchronize=nothing,
        empty_cache=nothing,
        ipc_collect=nothing,
        set_device=nothing,
        current_device=lambda: torch.device("cpu"),  # an index would mean an accelerator
        device_count=lambda: 1,
        memory_allocated=zero,
        memory_reserved=zero,
        max_memory_allocated=zero,
        max_memory_reserved=zero,
        mem_get_info=lambda *_: (0, 0),
        is_available=lambda: False,
    )

    class PlatformCPU(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = device

        def is_available(self) -> bool:
            return True

        def current_device(self) -> torch.device:
            return torch.device("cpu")

        def is_ipc_supported(self) -> bool:
            return False

    set_platform(PlatformCPU())
    monkey_patch.is_trl_available = lambda: False
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
