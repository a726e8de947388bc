"""Two E2M1 codes per byte along K, and E2M1 coding itself."""

from itertools import pairwise

import torch

from quads_common.format import BLOCK_SIZE, E2M1_MIDPOINTS, E2M1_VALUES

__all__ = ["decode_e2m1", "encode_e2m1", "pack_codes", "unpack_codes"]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 values to E2M1 codes 0..15 (uint8): nearest, ties to even, saturating at 6.

    The sign bit is the input's, zeros included. NaN gives an unspecified code.
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for boundary, up_on_tie in E2M1_MIDPOINTS:
        code += magnitude >= boundary if up_on_tie else magnitude > boundary
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes 0..15 (uint8) to float32 values."""
    # Summed steps instead of a table: no constant is copied from the host, so graphs can hold it.
    magnitude = codes & 7
    value = torch.zeros_like(codes, dtype=torch.float32)
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        value += (magnitude > code) * (high - low)
    return torch.where(codes > 7, -value, value)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """[..., K] uint8 codes to [..., K/2] bytes, even column in the low nibble.

    Raises:
        ValueError: K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"cannot pack K = {codes.shape[-1]} codes: two go into each byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """[..., K/2] bytes to [..., K] uint8 codes."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def unscaled_values(packed: torch.Tensor, block_scale: torch.Tensor) -> torch.Tensor:
    """``e2m1(code) * block_scale`` as float32 [..., K]: exact in bfloat16 and float16 too."""
    # One look-up per byte instead of two per byte and an interleaving.
    every_byte = torch.arange(256, dtype=torch.uint8, device=packed.device).unsqueeze(1)
    table = decode_e2m1(unpack_codes(every_byte))  # [256, 2]
    values = torch.nn.functional.embedding(packed.int(), table).flatten(-2)
    blocks = values.unflatten(-1, (block_scale.shape[-1], BLOCK_SIZE))
    return (blocks * block_scale.float().unsqueeze(-1)).flatten(-2)
