"""Which implementation of the GEMMs runs: chosen once per process, by name, never by accident.

``emulated`` is plain torch in float32: any device, not inside CUDA graphs. ``triton`` runs on the
tensor cores of CUDA GPUs from sm_80 on, inside CUDA graphs too. ``hopper`` is ``triton`` with CUDA
C++ kernels for sm_90 where they are faster: MoE layers of some shapes, up to a few hundred tokens.
``blackwell`` is the same on FP4 tensor cores (sm_100, sm_103, sm_120): compiled and interpreted by
the tests, never run on one. All have the semantics of ``gemm`` and ``moe``; their results differ by
the order of summation only.

Not every layer has a path of its own in ``hopper``, and the choice for a layer decides the memory
order of its weights, so it is made once, when the layer is built (``moe_backend``).
"""

import importlib.util

from quads_common.activation import Activation
from quads_common.gemm import ActFormat

__all__ = ["BACKENDS", "choose_backend", "general_backend", "moe_backend"]

BACKENDS = ("auto", "emulated", "triton", "hopper", "blackwell")
TRITON_CAPABILITY = (8, 0)
HOPPER_CAPABILITY = (9, 0)


def choose_backend(
    requested: str, device_type: str, capability: tuple[int, int] | None = None
) -> str:
    """Name of the backend; "auto": "emulated" on a CPU, "hopper" on sm_90, "blackwell" on GPUs with
    native FP4, else "triton".

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

    hopper = capability is not None and tuple(capability) == HOPPER_CAPABILITY
    native = has_native_fp4(capability)
    if requested == "auto":
        requested = "hopper" if hopper else "blackwell" if native else "triton"
    if requested == "blackwell":
        check_blackwell(device_type, capability)
        return requested
    _check_triton(requested, device_type, capability)
    if requested == "hopper" and not hopper:
        raise ValueError(
            f"backend 'hopper' needs a GPU of compute capability sm_90, this one is "
            f"{_name(capability)}; use backend 'triton'"
        )
    return requested


def general_backend(backend: str) -> str:
    """The backend of layers without a path of their own in ``backend``: linears."""
    return "triton" if backend == "hopper" else backend


def moe_backend(
    backend: str,
    experts: int,
    hidden: int,
    inner: int,
    activation: Activation,
    act: ActFormat,
    rac: bool = False,
    splice: bool = False,
    columns: tuple[int, int] = (0, 0),
) -> tuple[str, str | None]:
    """The backend of an MoE layer of this shape, and why it is another than ``backend``, if it is.

    rac, splice: what compensates GEMM2's input. columns: how many hot channels of each GEMM's input
    have BF16 columns.

    ``hopper``: its weights are tiled (``weight_tiles``). Its kernels are compiled here.

    Raises:
        RuntimeError: ``hopper`` without NVRTC; never another backend instead.
    """
    if backend != "hopper":
        return backend, None
    from quads_common.kernels import hopper

    reason = hopper.why_not_hopper(experts, hidden, inner, activation, columns)
    if reason is not None:
        return general_backend(backend), reason
    hopper.prepare(hidden, inner, act, rac, splice, columns)
    return backend, None


def _check_triton(backend: str, device_type: str, capability: tuple[int, int] | None) -> None:
    major, minor = TRITON_CAPABILITY
    needs = f"backend {backend!r} needs a CUDA GPU of compute capability sm_{major}{minor} or newer"
    otherwise = "backend 'emulated' is slow but runs everywhere"
    if device_type != "cuda":
        raise ValueError(f"{needs}, the device is {device_type!r}; {otherwise}")
    if capability is None:
        raise ValueError(f"{needs}, but this GPU's is not known; {otherwise}")
    if tuple(capability) < TRITON_CAPABILITY:
        raise ValueError(f"{needs}, this one is {_name(capability)}; {otherwise}")
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError(f"backend {backend!r} needs Triton, which is not installed; {otherwise}")


def _name(capability: tuple[int, int] | None) -> str:
    return "unknown" if capability is None else f"sm_{capability[0]}{capability[1]}"
