"""Which GPUs and Triton versions the native FP4 kernels are for; asked before any is compiled.

Only what the tests compile is allowed: Triton 3.6 aborts the whole process when it meets
``tl.dot_scaled`` for a GPU without such an instruction, and later versions fall back to bfloat16.
"""

import re

__all__ = ["CAPABILITIES", "MIN_TRITON", "check_blackwell", "has_native_fp4"]

# B200/GB200, B300/GB300, RTX 50 and RTX PRO Blackwell.
CAPABILITIES = ((10, 0), (10, 3), (12, 0))
MIN_TRITON = (3, 6)


def has_native_fp4(capability: tuple[int, int] | None) -> bool:
    """Whether the backend ``blackwell`` is for a GPU of (major, minor)."""
    return capability is not None and tuple(capability) in CAPABILITIES


def check_blackwell(device_type: str, capability: tuple[int, int] | None) -> None:
    """Refuse devices and Triton versions that the kernels were not compiled for.

    Raises:
        ValueError: another device. RuntimeError: Triton is missing or too old.
    """
    if device_type != "cuda" or not has_native_fp4(capability):
        known = [f"sm_{major}{minor}" for major, minor in CAPABILITIES]
        this = device_type if capability is None else "sm_{}{}".format(*capability)
        raise ValueError(f"backend 'blackwell' needs a GPU of {known}, this one is {this}")
    wanted = ".".join(map(str, MIN_TRITON))
    needs = f"backend 'blackwell' needs Triton {wanted} or newer"
    try:
        import triton  # type: ignore[import-untyped]
    except ImportError:
        raise RuntimeError(f"{needs}, which is not installed") from None
    version = triton.__version__
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < MIN_TRITON:
        raise RuntimeError(f"{needs}, found {version}; backend 'triton' takes older ones")
