"""CUDA C++ to kernels that can be launched, with what PyTorch's wheels bring: NVRTC.

No compiler and no CUDA headers on the user's machine. The machine code is cached on disk by source,
options, architecture and NVRTC's version (``cubin_cache``).
"""

import ctypes
import glob
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import torch

from quads_common.kernels.cuda.cubin_cache import cached_cubin

__all__ = ["Kernel", "Nvrtc", "compile_cubin", "load_kernels"]

SOURCES = Path(__file__).parent
# CUfunction_attribute and CUlaunchAttributeID of the driver's interface.
STATIC_SHARED_MEMORY, MAX_DYNAMIC_SHARED_MEMORY = 1, 8
PROGRAMMATIC_STREAM_SERIALIZATION = 6


class Nvrtc:
    """The runtime compiler. Raises ``RuntimeError`` where there is none."""

    def __init__(self) -> None:
        self.library = _find_nvrtc()
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), None)
        self.version = (major.value, minor.value)

    def compile(self, source: Path, headers: Sequence[Path], options: Sequence[str]) -> bytes:
        """The cubin of a source file. Raises ``RuntimeError`` with the compiler's messages."""
        program = ctypes.c_void_p()
        texts = (ctypes.c_char_p * len(headers))(*(h.read_bytes() for h in headers))
        names = (ctypes.c_char_p * len(headers))(*(h.name.encode() for h in headers))
        lib = self.library
        status = lib.nvrtcCreateProgram(
            ctypes.byref(program), source.read_bytes(), source.name.encode(), len(headers), texts,
            names,
        )  # fmt: skip
        self._check(status, None)
        try:
            flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
            self._check(lib.nvrtcCompileProgram(program, len(options), flags), program)
            size = ctypes.c_size_t()
            self._check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), program)
            cubin = ctypes.create_string_buffer(size.value)
            self._check(lib.nvrtcGetCUBIN(program, cubin), program)
            return cubin.raw
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, status: int, program: ctypes.c_void_p | None) -> None:
        if status == 0:
            return
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
        message = self.library.nvrtcGetErrorString(status).decode()
        if program is not None:
            size = ctypes.c_size_t()
            self.library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self.library.nvrtcGetProgramLog(program, log)
            message += "\n" + log.value.decode(errors="replace")
        raise RuntimeError(f"NVRTC: {message}")


def compile_cubin(name: str, architecture: str, defines: Mapping[str, str]) -> bytes:
    """Machine code of ``<name>.cu`` for e.g. "sm_90a", from the cache if it is there.

    The cache is ``$QUADS_KERNEL_CACHE``, by default ``quads_nvfp4`` in ``$XDG_CACHE_HOME``
    (``~/.cache``). Where it cannot be written a warning says so.

    Raises:
        RuntimeError: there is no NVRTC, or the source does not compile.
    """
    nvrtc = _nvrtc()
    source, headers = SOURCES / f"{name}.cu", sorted(SOURCES.glob("*.cuh"))
    # -fmad=false: the quantizer's contract forbids contracted multiply-adds.
    options = [f"--gpu-architecture={architecture}", "-std=c++17", "-default-device", "-fmad=false"]
    options += [f"-D{key}={value}" for key, value in sorted(defines.items())]
    digest = hashlib.sha256(repr((nvrtc.version, options)).encode())
    for path in (source, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    file = f"{name}-{architecture}-{digest.hexdigest()[:32]}.cubin"
    return cached_cubin(file, lambda: nvrtc.compile(source, headers, options))


class Kernel:
    """A loaded kernel of one GPU. A launch may use all shared memory that a thread block can have.

    shared: bytes of it, the kernel's static variables included.
    """

    def __init__(self, function: ctypes.c_void_p, shared: int) -> None:
        self._function, driver, static = function, _driver(), ctypes.c_int()
        _check_driver(
            driver.cuFuncGetAttribute(ctypes.byref(static), STATIC_SHARED_MEMORY, function)
        )
        dynamic = shared - static.value
        _check_driver(driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED_MEMORY, dynamic))

    def launch(
        self, grid: int, block: int, shared: int, arguments: ctypes.Structure, stream: int
    ) -> None:
        """Launch on a stream; may begin before the kernel in front ends, and must wait for it."""
        attribute = _Attribute(id=PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = _LaunchConfig(
            grid, 1, 1, block, 1, 1, shared, stream, ctypes.pointer(attribute), 1
        )
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _check_driver(
            _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, pointers, None)
        )


def load_kernels(cubin: bytes, names: Sequence[str], shared: int) -> dict[str, Kernel]:
    """Load machine code into the current GPU's context."""
    module, driver = ctypes.c_void_p(), _driver()
    _check_driver(driver.cuModuleLoadData(ctypes.byref(module), cubin))
    kernels = {}
    for name in names:
        function = ctypes.c_void_p()
        _check_driver(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        kernels[name] = Kernel(function, shared)
    return kernels


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"grid_{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block_{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


_nvrtc = cache(Nvrtc)


def _find_nvrtc() -> ctypes.CDLL:
    """The library in the ``nvidia`` packages of the Python path, else the system's."""
    major = (torch.version.cuda or "13").partition(".")[0]
    for folder in sys.path:
        pattern = os.path.join(glob.escape(folder), f"nvidia/**/libnvrtc.so.{major}*")
        if found := sorted(glob.glob(pattern, recursive=True)):
            return _load_nvrtc(Path(found[0]), major)
    try:
        return ctypes.CDLL(f"libnvrtc.so.{major}")
    except OSError:
        package = "nvidia-cuda-nvrtc" + ("-cu12" if major == "12" else "")
        raise RuntimeError(
            f"backend 'hopper' compiles its kernels with NVRTC {major}, which was not found: "
            f"pip install {package}, or use backend 'triton'"
        ) from None


def _load_nvrtc(file: Path, major: str) -> ctypes.CDLL:
    try:
        # Its other half, which it opens by name.
        for part in sorted(file.parent.glob(f"libnvrtc-builtins.so.{major}*")):
            ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise RuntimeError(
            f"backend 'hopper' compiles its kernels with {file}, which cannot be loaded ({error}): "
            "install it again, or use backend 'triton'"
        ) from error


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check_driver(status: int) -> None:
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        message = text.value.decode() if text.value else "unknown error"
        raise RuntimeError(f"CUDA driver: {message} ({status})")
