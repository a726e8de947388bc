"""A 128-bit fingerprint of a quantized weight that trainer and engine compute alike.

The hash is linear: each 16-block contributes its codes (two 32-bit words) and its scale byte, each
times a 64-bit coefficient that depends on the block's position in the FULL tensor, summed modulo
2^64, twice with different coefficients. So it needs no particular memory order, runs where the
tensor lies, and the shards of a tensor- or expert-parallel engine add up to the fingerprint of the
whole. It detects differences; it is no defence against an adversary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quads_common.format import BLOCK_SIZE, CONTRACT_VERSION, QuantizedTensor

__all__ = [
    "PartialFingerprint",
    "combine",
    "combine_ranks",
    "differing",
    "fingerprint",
    "partial_fingerprint",
]

_CHUNK_BLOCKS = 1 << 20
_SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)  # digits of pi
_WORDS_PER_BLOCK = 3

Region4 = tuple[int, int, int, int]  # first row, rows, first k, k


@dataclass(frozen=True)
class PartialFingerprint:
    """What a rank knows of one tensor: two sums over its blocks, and the shared global scale.

    sums: two integers modulo 2^64. global_scale_bits: the float32's bits. shape: of the FULL
    tensor. region: (first row, rows, first k, k) that is summed, so that a missing shard shows.
    """

    sums: tuple[int, int]
    global_scale_bits: int
    shape: tuple[int, int]
    region: Region4

    @property
    def blocks(self) -> int:
        """Number of 16-blocks in the region."""
        return self.region[1] * self.region[3] // BLOCK_SIZE

    def to_json(self) -> dict[str, Any]:
        """Plain lists and integers, for an RPC."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "PartialFingerprint":
        """Undo ``to_json``."""
        return cls(
            tuple(raw["sums"]),
            raw["global_scale_bits"],
            tuple(raw["shape"]),
            tuple(raw["region"]),
        )


def fingerprint(q: QuantizedTensor) -> str:
    """Digest of one unsharded weight matrix [N, K] (see ``combine``)."""
    return combine([partial_fingerprint(q)])


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
    words = _words(q.packed).view(rows * k_blocks, 2)
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
    region = (row_offset, rows, k_offset, k)
    return PartialFingerprint((sums[0], sums[1]), scale_bits, full, region)


def combine(parts: Sequence[PartialFingerprint]) -> str:
    """The digest of a whole tensor from its shards; equal replicas of a shard count once.

    Text: ``v<contract>:<rows>x<k>:<32 hex digits>:<global scale bits>``.

    Raises:
        ValueError: shards are missing or overlap, or disagree on the global scale or the shape, or
            two replicas of a shard differ.
    """
    if not parts:
        raise ValueError("no fingerprint to combine")
    first = parts[0]
    shards: dict[Region4, PartialFingerprint] = {}
    for part in parts:
        if (part.global_scale_bits, part.shape) != (first.global_scale_bits, first.shape):
            raise ValueError(f"shards disagree: {first} and {part}")
        if shards.setdefault(part.region, part) != part:
            raise ValueError(f"replicas of a shard differ: {shards[part.region]} and {part}")
    regions = list(shards)
    overlapping = [(a, b) for i, a in enumerate(regions) for b in regions[:i] if _overlap(a, b)]
    if overlapping:
        raise ValueError(f"shards overlap: (first row, rows, first k, k) {overlapping[0]}")
    rows, k = first.shape
    covered, total = sum(p.blocks for p in shards.values()), rows * k // BLOCK_SIZE
    if covered != total:
        raise ValueError(f"the shards cover {covered} of {total} blocks of a {rows} x {k} tensor")
    low, high = (sum(p.sums[i] for p in shards.values()) % 2**64 for i in range(2))
    return f"v{CONTRACT_VERSION}:{rows}x{k}:{low:016x}{high:016x}:{first.global_scale_bits:08x}"


def combine_ranks(
    ranks: Sequence[Mapping[str, Sequence[Mapping[str, Any]]]],
) -> dict[str, str]:
    """Digest by tensor name from what each rank of an engine reported (``to_json`` forms).

    Raises:
        ValueError: as ``combine``, naming the tensor.
    """
    parts: dict[str, list[PartialFingerprint]] = {}
    for rank in ranks:
        for name, raw in rank.items():
            parts.setdefault(name, []).extend(PartialFingerprint.from_json(r) for r in raw)
    digests = {}
    for name, found in parts.items():
        try:
            digests[name] = combine(found)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return digests


def differing(trainer: Mapping[str, str], engine: Mapping[str, str]) -> list[str]:
    """Names whose digests differ or that only one side has, sorted; empty means in sync."""
    return sorted(n for n in trainer.keys() | engine.keys() if trainer.get(n) != engine.get(n))


def _words(packed: torch.Tensor) -> torch.Tensor:
    """The bytes as int32, copied where they are not aligned for that."""
    flat = packed.reshape(-1)
    return (flat.clone() if flat.storage_offset() % 4 else flat).view(torch.int32)


def _overlap(a: Region4, b: Region4) -> bool:
    rows = a[0] < b[0] + b[1] and b[0] < a[0] + a[1]
    return rows and a[2] < b[2] + b[3] and b[2] < a[2] + a[3]


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
