"""Which implementation of the GEMMs runs: chosen once per process, by name, never by accident.

``emulated`` is plain torch in float32: any device, not inside CUDA graphs. ``triton`` runs on the
tensor cores of CUDA GPUs from sm_80 on, inside CUDA graphs too. All have the semantics of ``gemm``
and ``moe``; their results differ by the order of summation only. ``blackwell`` is the same on FP4
tensor cores (sm_100, sm_103, sm_120): compiled and interpreted by the tests, never run on one.
"""

import importlib.util

__all__ = ["BACKENDS", "choose_backend"]

BACKENDS = ("auto", "emulated", "triton", "blackwell")
TRITON_CAPABILITY = (8, 0)


def choose_backend(
    requested: str, device_type: str, capability: tuple[int, int] | None = None
) -> str:
    """Name of the backend: "auto" is "emulated" on a CPU, else "triton" or "blackwell".

    device_type: "cpu" or "cuda". capability: (major, minor) of the GPU.

    Raises:
        ValueError: unknown name or device; a GPU that the backend does not run on.
        RuntimeError: the backend needs Triton and it is not installed.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend {requested!r} is not allowed: one of {list(BACKENDS)}")
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"no backend for device {device_type!r}: cpu and cuda have one")
    if requested == "emulated" or (requested == "auto" and device_type == "cpu"):
        return "emulated"
    from quads_common.kernels.blackwell.capability import check_blackwell, has_native_fp4

    if requested == "blackwell" or (requested == "auto" and has_native_fp4(capability)):
        check_blackwell(device_type, capability)
        return "blackwell"
    _check_triton(device_type, capability)
    return "triton"


def _check_triton(device_type: str, capability: tuple[int, int] | None) -> None:
    major, minor = TRITON_CAPABILITY
    needs = f"backend 'triton' needs a CUDA GPU of compute capability sm_{major}{minor} or newer"
    otherwise = "backend 'emulated' is slow but runs everywhere"
    if device_type != "cuda":
        raise ValueError(f"{needs}, the device is {device_type!r}; {otherwise}")
    if capability is None:
        raise ValueError(f"{needs}, but this GPU's is not known; {otherwise}")
    if tuple(capability) < TRITON_CAPABILITY:
        raise ValueError(f"{needs}, this one is sm_{capability[0]}{capability[1]}; {otherwise}")
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(f"backend 'triton' needs Triton, which is not installed; {otherwise}")
