"""Makes Triton's interpreter compute as the GPU does where our kernels need it.

The stock interpreter (3.6 to 3.9) truncates float32 to bfloat16, multiplies the bits of bfloat16 in
``tl.dot`` and knows no inline assembly. Patched are its builder's methods, for this process.
"""

import re

import numpy as np
import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.ptx import execute

ORIGINAL_CAST = InterpreterBuilder.cast_impl


def apply() -> None:
    """Patch the interpreter; twice is once."""
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_fp_to_fp = lambda self, src, dtype, mode=None: convert(src, dtype)
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_inline_asm = _inline_asm


def _is_bf16(dtype) -> bool:
    return getattr(dtype.scalar, "name", "") == "bf16"


def _values(handle: TensorHandle) -> np.ndarray:
    """A handle's numbers; bfloat16, which is stored as bits, becomes float32."""
    if not _is_bf16(handle.dtype):
        return handle.data
    return (handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32)


def convert(src: TensorHandle, dtype) -> TensorHandle:
    """Between the interpreter's floating types but FP8: to nearest, ties to even."""
    values, scalar = _values(src), dtype.scalar
    if not _is_bf16(scalar):
        return TensorHandle(values.astype(interpreter._get_np_dtype(scalar)), scalar)
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(torch.bfloat16)
    bits = rounded.view(torch.int16).numpy().view(np.uint16)
    return TensorHandle(bits.reshape(values.shape), scalar)


def _cast(self, src: TensorHandle, dtype) -> TensorHandle:
    if _is_bf16(src.dtype) or _is_bf16(dtype):
        return convert(src, dtype)
    return ORIGINAL_CAST(self, src, dtype)


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
    product = np.matmul(_values(a).astype(np.float32), _values(b).astype(np.float32))
    return TensorHandle(product + d.data, d.dtype.scalar)


def _inline_asm(self, text, constraints, values, types, is_pure, pack):
    """Elements are packed in pairs along the last dimension, as in any layout that the GPU uses."""
    outputs = len(re.findall("=[rh]", constraints))
    types = types if isinstance(types, list | tuple) else [types]
    if pack == 1:
        unsigned = {8: np.uint64, 2: np.uint16}
        inputs = [v.data.view(unsigned[v.data.itemsize]) for v in values]
        inputs = [v.astype(np.uint32) if v.itemsize == 2 else v for v in inputs]
        results = [r.astype(np.uint16) for r in execute(text, inputs, outputs)]
        return _Results(
            [
                TensorHandle(r.view(interpreter._get_np_dtype(t.scalar)), t.scalar)
                for r, t in zip(results, types, strict=True)
            ]
        )
    assert pack == 2, f"{pack=}"
    inputs = []
    for value in values:
        even, odd = value.data[..., 0::2], value.data[..., 1::2]
        if value.data.itemsize == 4:
            inputs += [even.view(np.uint32), odd.view(np.uint32)]
        else:
            even, odd = (np.ascontiguousarray(x).view(np.uint16) for x in (even, odd))
            inputs.append(even.astype(np.uint32) | (odd.astype(np.uint32) << np.uint32(16)))
    results = execute(text, inputs, outputs)
    handles = []
    for result, dtype in zip(results, types, strict=True):
        halves = np.stack([result & np.uint32(0xFFFF), result >> np.uint32(16)], -1)
        bits = halves.astype(np.uint16).reshape(values[0].data.shape)
        numpy_dtype = interpreter._get_np_dtype(dtype.scalar)
        handles.append(TensorHandle(bits.view(numpy_dtype), dtype.scalar))
    return _Results(handles)


class _Results:
    def __init__(self, handles: list[TensorHandle]) -> None:
        self.handles = handles

    def get_result(self, i: int) -> TensorHandle:
        return self.handles[i]
