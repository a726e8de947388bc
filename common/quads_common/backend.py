"""Which implementation of the GEMMs runs: chosen once per process, by name, never by accident."""

__all__ = ["BACKENDS", "choose_backend"]

# "emulated": plain torch in float32, on any device. Not for CUDA graphs.
BACKENDS = ("auto", "emulated")


def choose_backend(requested: str, device_type: str) -> str:
    """Name of the backend for a device type ("cpu", "cuda").

    Raises:
        ValueError: unknown name or device.
    """
    if requested not in BACKENDS:
        raise ValueError(f"backend {requested!r} is not allowed: one of {list(BACKENDS)}")
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"no backend for device {device_type!r}: cpu and cuda have one")
    return "emulated"
