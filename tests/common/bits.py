"""Comparing quantized tensors bit for bit, with numbers in the message."""

import numpy as np
import torch

from quads_common.format import QuantizedTensor
from tests.common.oracle import Encoded


def to_numpy(x: torch.Tensor) -> np.ndarray:
    """bf16, fp16 or fp32 to float32, exactly."""
    return x.detach().float().numpy()


def to_bits(x: torch.Tensor | np.ndarray) -> np.ndarray:
    """The bits of a tensor of any dtype; every NaN becomes the same one."""
    if isinstance(x, torch.Tensor):
        sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        if x.is_floating_point() and x.element_size() > 1:
            x = torch.where(x.isnan(), float("nan"), x)
        return x.contiguous().view(sizes[x.element_size()]).numpy()
    if x.dtype == np.float32:
        return np.where(np.isnan(x), np.float32("nan"), x).view(np.int32)
    return x


def assert_same_bits(
    actual: torch.Tensor | np.ndarray, expected: torch.Tensor | np.ndarray, what: str
) -> None:
    """Fail with the count, the place and both values of the first difference."""
    got, want = to_bits(actual), to_bits(expected)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, expected {want.shape}"
    different = got != want
    if not different.any():
        return
    place = tuple(int(i) for i in np.argwhere(different)[0])
    got_bits, want_bits = (int(np.asarray(a)[place]) for a in (got, want))
    raise AssertionError(
        f"{what}: {int(different.sum())} of {different.size} differ, the first at {list(place)}: "
        f"got {got_bits:#x}, expected {want_bits:#x}"
    )


def assert_equals_oracle(q: QuantizedTensor, expected: Encoded, what: str = "") -> None:
    """Packed bytes, scale bytes and global scale of ``q`` are the oracle's, bit for bit."""
    assert_same_bits(q.global_scale, expected.global_scale, f"{what} global scale")
    assert_same_bits(q.block_scale, expected.scale_bytes, f"{what} block scales")
    assert_same_bits(q.packed, expected.packed, f"{what} packed codes")


def assert_same_quantized(q: QuantizedTensor, expected: QuantizedTensor, what: str = "") -> None:
    """Two quantized tensors are equal, bit for bit."""
    assert_same_bits(q.global_scale, expected.global_scale, f"{what} global scale")
    assert_same_bits(q.block_scale, expected.block_scale, f"{what} block scales")
    assert_same_bits(q.packed, expected.packed, f"{what} packed codes")
