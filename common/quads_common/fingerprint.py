"""A 128-bit fingerprint of a quantized weight that trainer and engine compute alike.

The hash is linear: each 16-block contributes its codes (two 32-bit words) and its scale byte, each
times a 64-bit coefficient that depends on the block's position in the FULL tensor, summed modulo
2^64, twice with different coefficients. So it needs no particular memory order, runs where the
tensor lies, and the shards of a tensor- or expert-parallel engine add up to the fingerprint of the
whole. It detects differences; it is no defence against an adversary.
"""

from dataclasses import dataclass

import torch

from quads_common.format import BLOCK_SIZE, CONTRACT_VERSION, QuantizedTensor

__all__ = ["PartialFingerprint", "combine", "fingerprint", "partial_fingerprint"]

_CHUNK_BLOCKS = 1 << 20
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi
_WORDS_PER_BLOCK = 3


@dataclass(frozen=True)
class PartialFingerprint:
    """What a rank knows of one tensor: two sums over its blocks, and the shared global scale.

    sums: two integers modulo 2^64. global_scale_bits: the float32's bits. shape: of the FULL tensor.
    blocks: how many of the full tensor's blocks are summed, so that a missing shard shows.
    """

    sums: tuple[int, int]
    global_scale_bits: int
    shape: tuple[int, int]
    blocks: int

    def digest(self) -> str:
        """The fingerprint as text, ``v<contract>:<rows>x<k>:<32 hex digits>:<global scale bits>``.

        Raises:
            ValueError: blocks are missing or counted twice.
        """
        total = self.shape[0] * self.shape[1] // BLOCK_SIZE
        if self.blocks != total:
            raise ValueError(f"fingerprint covers {self.blocks} of {total} blocks")
        rows, k = self.shape
        first, second = self.sums
        return (
            f"v{CONTRACT_VERSION}:{rows}x{k}:{first:016x}{second:016x}:{self.global_scale_bits:08x}"
        )


def fingerprint(q: QuantizedTensor) -> str:
    """Fingerprint of one unsharded weight matrix [N, K] (see ``PartialFingerprint.digest``)."""
    return partial_fingerprint(q).digest()


def partial_fingerprint(
    q: QuantizedTensor,
    *,
    row_offset: int = 0,
    k_offset: int = 0,
    full_shape: tuple[int, int] | None = None,
) -> PartialFingerprint:
    """Fingerprint of the shard that begins at (row_offset, k_offset) of a [N, K] weight."""
    if len(q.shape) != 2 or q.per_token:
        raise ValueError(f"a fingerprint is of one weight matrix [N, K], got {list(q.shape)}")
    rows, k = q.shape
    full = full_shape or (rows, k)
    k_blocks, full_k_blocks = k // BLOCK_SIZE, full[1] // BLOCK_SIZE
    words = q.packed.contiguous().view(torch.int32).view(rows * k_blocks, 2)
    scales = q.block_scale.contiguous().view(torch.uint8).view(-1)
    sums = [0, 0]
    for start in range(0, rows * k_blocks, _CHUNK_BLOCKS):
        local = torch.arange(
            start, min(start + _CHUNK_BLOCKS, rows * k_blocks), device=q.packed.device
        )
        block = (local // k_blocks + row_offset) * full_k_blocks + (
            local % k_blocks + k_offset // BLOCK_SIZE
        )
        values = torch.cat(
            [words[local].long() & 0xFFFFFFFF, scales[local].long().unsqueeze(1)], dim=1
        )
        index = block.unsqueeze(1) * _WORDS_PER_BLOCK + torch.arange(
            _WORDS_PER_BLOCK, device=block.device
        )
        for i, seed in enumerate(_SEEDS):
            part = int((values * _coefficients(index, seed)).sum().item())
            sums[i] = (sums[i] + part) % 2**64
    scale_bits = int(q.global_scale.view(torch.int32).item()) & 0xFFFFFFFF
    return PartialFingerprint((sums[0], sums[1]), scale_bits, full, rows * k_blocks)


def combine(parts: list[PartialFingerprint]) -> PartialFingerprint:
    """Add up the disjoint shards of one tensor.

    Raises:
        ValueError: the parts disagree on the global scale or on the full shape.
    """
    if not parts:
        raise ValueError("no fingerprint to combine")
    first = parts[0]
    for part in parts[1:]:
        if (part.global_scale_bits, part.shape) != (first.global_scale_bits, first.shape):
            raise ValueError(f"shards disagree: {first} and {part}")
    sums = tuple(sum(p.sums[i] for p in parts) % 2**64 for i in range(2))
    return PartialFingerprint(
        (sums[0], sums[1]), first.global_scale_bits, first.shape, sum(p.blocks for p in parts)
    )


def _coefficients(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Odd 64-bit coefficients for int64 positions: the splitmix64 output function."""
    z = index * _signed(0x9E3779B97F4A7C15) + _signed(seed)
    z = (z ^ _shift_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift_right(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shift_right(z, 31)) | 1


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (z >> bits) & (2 ** (64 - bits) - 1)
