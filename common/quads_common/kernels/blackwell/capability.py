"""Which GPUs and Triton versions the native FP4 kernels are for. Imports neither.

Only what the tests compile is allowed: Triton 3.6 aborts the whole process when it meets
``tl.dot_scaled`` for a GPU without such an instruction, and later versions fall back to bfloat16.
"""

import importlib.metadata
import re

__all__ = ["CAPABILITIES", "MIN_TRITON", "check_triton", "has_native_fp4"]

# B200/GB200, B300/GB300, RTX 50 and RTX PRO Blackwell.
CAPABILITIES = ((10, 0), (10, 3), (12, 0))
MIN_TRITON = (3, 6)


def has_native_fp4(capability: tuple[int, int] | None) -> bool:
    """Whether the backend ``blackwell`` is for a GPU of (major, minor)."""
    return capability is not None and tuple(capability) in CAPABILITIES


def check_triton() -> None:
    """Refuse Triton versions that were not tried.

    Raises:
        RuntimeError: Triton is missing or too old.
    """
    wanted = ".".join(map(str, MIN_TRITON))
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"backend 'blackwell' needs Triton {wanted} or newer, which is not installed"
        ) from None
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < MIN_TRITON:
        raise RuntimeError(f"backend 'blackwell' needs Triton {wanted} or newer, found {version}")
