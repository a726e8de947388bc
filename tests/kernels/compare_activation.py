"""The fast SiLU against the plain one, bit for bit, on every float of 16 bits."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from quads_common.kernels._activation import silu

Check = tuple[str, bool, str]
COUNT = 2**16


@triton.jit
def silu_kernel(x_ptr, out_ptr, PTX: tl.constexpr, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + at, silu(tl.load(x_ptr + at), PTX))


def fast_silu(device: str, shapes: dict, quick: bool) -> Iterator[Check]:
    """All of a dtype's values but +Inf, where the fast one gives NaN. Only a GPU has both."""
    if device == "cpu":
        return
    for dtype in (torch.bfloat16, torch.float16):
        bits = torch.arange(COUNT, dtype=torch.int32, device=device).to(torch.int16)
        x = bits.view(dtype).float()
        plain, fast = torch.empty_like(x), torch.empty_like(x)
        for out, ptx in ((plain, False), (fast, True)):
            silu_kernel[(COUNT // 1024,)](x, out, ptx, 1024, enable_fp_fusion=False)
        ok = plain.view(torch.int32) == fast.view(torch.int32)
        ok |= (plain.isnan() | x.isposinf()) & fast.isnan()
        wrong = x[~ok]
        text = f"{wrong.numel()} of {COUNT} differ, first {wrong[:4].tolist()}"
        yield f"fast silu {dtype}", not wrong.numel(), text
