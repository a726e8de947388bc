"""Executes the PTX of the kernels' inline assembly on numpy arrays: the text itself is tested."""

import re
from collections.abc import Callable

import numpy as np
import torch


def execute(text: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Run an inline-assembly text on arrays: $0.. are outputs, the inputs follow.

    Registers are uint32; an input of 64 bits is uint64, one of 16 bits has its upper half 0.
    """
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    shape = inputs[0].shape
    for line in text.strip().removeprefix("{").removesuffix("}").split(";"):
        line = line.strip()
        if not line or line.startswith(".reg"):
            continue
        name, operands = line.split(None, 1)
        target, *sources = re.findall(r"{[^}]*}|[^\s,]+", operands)
        if target.startswith("{"):  # one register to two of half its size
            low, high = re.findall(r"[^\s,{}]+", target)
            bits = {"mov.b64": 32, "mov.b32": 16}[name]
            value = registers[sources[0]].astype(np.uint64)
            registers[low] = (value & np.uint64(2**bits - 1)).astype(np.uint32)
            registers[high] = (value >> np.uint64(bits)).astype(np.uint32)
        elif sources[0].startswith("{"):
            low, high = (registers[part] for part in re.findall(r"[^\s,{}]+", sources[0]))
            registers[target] = low | (high << np.uint32(16))
        else:
            values = [
                registers[source] if source in registers else np.full(shape, _number(source))
                for source in sources
            ]
            registers[target] = INSTRUCTIONS[name](*values)
    return [registers[f"${i}"] for i in range(outputs)]


def _number(text: str) -> np.uint32:
    """An integer, or the bits of a float as PTX writes them."""
    value = int(text[2:], 16) if text.startswith("0f") else int(text, 0)
    return np.uint32(value & 0xFFFFFFFF)


def _float32(function: Callable) -> Callable:
    """Bits to bits of a function of float32 values, computed in float64 and rounded."""

    def run(*arguments: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            values = [a.view(np.float32).astype(np.float64) for a in arguments]
            return function(*values).astype(np.float32).view(np.uint32)

    return run


def _multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 values, rounded to odd in float64: a second rounding then does no harm.

    The product is exact. So is the sum's error, as long as nothing is infinite.
    """
    product = a * b
    total = product + c
    added = total - product
    error = (product - (total - added)) + (c - added)
    bits = total.view(np.int64)
    inexact = np.isfinite(error) & (error != 0) & (bits % 2 == 0)
    return (bits + np.where(inexact, np.where((error > 0) == (total > 0), 1, -1), 0)).view(
        np.float64
    )


def flushed(x: np.ndarray) -> np.ndarray:
    """float32 values without their subnormals, as instructions with .ftz take and give them."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0, x), x)


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    result = np.zeros_like(a)
    for i in range(4):
        nibble = (selector.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
        assert not (nibble & np.uint64(8)).any(), "sign replication is not used"
        byte = (both >> (nibble * np.uint64(8))) & np.uint64(0xFF)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    lookup = int(table.flat[0]) if table.size else 0
    result = np.zeros_like(a)
    for row in range(8):
        if lookup >> row & 1:
            result |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
    return result


def _floats(pairs: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    halves = np.stack([pairs & np.uint32(0xFFFF), pairs >> np.uint32(16)], -1)
    return torch.from_numpy(halves.astype(np.uint16).view(np.int16)).view(dtype)


def _pairs(values: torch.Tensor) -> np.ndarray:
    halves = values.contiguous().view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return halves[..., 0] | (halves[..., 1] << np.uint32(16))


def _fma(dtype: torch.dtype, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    # Exact in float64 for the short mantissas that are used, then one rounding.
    x, y, z = (_floats(v, dtype).double() for v in (a, b, c))
    return _pairs((x * y + z).to(dtype))


INSTRUCTIONS = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, b: a << b,
    "shr.u32": lambda a, b: a >> b,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.f16x2": lambda a, b: _pairs(_floats(a, torch.float16) * _floats(b, torch.float16)),
    "fma.rn.bf16x2": lambda a, b, c: _fma(torch.bfloat16, a, b, c),
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "min.f32": _float32(np.fmin),
    "mul.f32": _float32(np.multiply),
    "fma.rn.f32": _float32(_multiply_add),
}
