"""Makes Triton's interpreter multiply NVFP4 operands, and read E4M3 numbers.

The interpreter of Triton 3.9 takes the E4M3 scales of ``tl.dot_scaled`` for E8M0 bytes, without a
word: wrong by powers of two. That of 3.6 raises. Patched are its builder's methods, for this
process, with torch's decoding of E4M3.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels import interpreter

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def apply() -> None:
    """Patch the interpreter, also for everything that other kernels need; twice is once."""
    interpreter.apply()
    InterpreterBuilder.create_dot_scaled = _dot_scaled
    InterpreterBuilder.create_fp_to_fp = _convert


def _convert(self, src: TensorHandle, dtype, mode=None) -> TensorHandle:
    if getattr(src.dtype.scalar, "name", "") == "fp8e4nv":
        src = TensorHandle(_e4m3(src), tl.float32)
    return interpreter.convert(src, dtype)


def _dot_scaled(
    self, lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, fast_math, lhs_k_pack,
    rhs_k_pack, acc,
) -> TensorHandle:  # fmt: skip
    formats = {str(f).rpartition(".")[2] for f in (lhs_format, rhs_format)}
    assert formats == {"E2M1"} and lhs_k_pack and rhs_k_pack, f"{formats=}"
    left = _values(lhs.data, lhs_scale)  # [N, K]
    right = _values(rhs.data.T, rhs_scale)  # [M, K]
    return TensorHandle((left @ right.T + acc.data).astype(np.float32), tl.float32)


def _values(packed: np.ndarray, scale: TensorHandle) -> np.ndarray:
    """code * block scale, exact: [rows, K/2] bytes and [rows, K/16] E4M3 to float32 [rows, K]."""
    code = np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)
    return E2M1[code] * np.repeat(_e4m3(scale), 16, axis=-1)


def _e4m3(handle: TensorHandle) -> np.ndarray:
    """The numbers of a handle of E4M3 bytes, float32."""
    assert handle.dtype.scalar.name == "fp8e4nv", f"{handle.dtype=}"
    byte = torch.from_numpy(np.ascontiguousarray(handle.data).view(np.uint8).copy())
    return byte.view(torch.float8_e4m3fn).float().numpy().reshape(handle.data.shape)
