"""Fingerprints: an independent computation, shards, and every kind of change."""

import json
from importlib import import_module

import pytest
import torch

from quads_common import fingerprint, quantize
from quads_common.fingerprint import (
    PartialFingerprint,
    combine,
    combine_ranks,
    differing,
    partial_fingerprint,
)
from quads_common.format import QuantizedTensor
from tests.common.samples import normal

MASK = 2**64 - 1
SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344)


def weight(rows: int = 6, k: int = 96) -> QuantizedTensor:
    return quantize(normal(rows, k))


def splitmix64(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def by_integers(q: QuantizedTensor) -> str:
    """The digest in python integers: word ``3 * block + i`` times an odd splitmix64 coefficient."""
    rows, k = q.shape
    sums = [0, 0]
    for row in range(rows):
        for block in range(k // 16):
            code_bytes = bytes(q.packed[row, 8 * block : 8 * block + 8].tolist())
            scale_byte = int(q.block_scale.view(torch.uint8)[row, block])
            words = [
                int.from_bytes(code_bytes[:4], "little"),
                int.from_bytes(code_bytes[4:], "little"),
                scale_byte,
            ]
            for i, word in enumerate(words):
                position = 3 * (row * (k // 16) + block) + i
                for s, seed in enumerate(SEEDS):
                    state = (position * 0x9E3779B97F4A7C15 + seed) & MASK
                    sums[s] = (sums[s] + word * (splitmix64(state) | 1)) & MASK
    scale_bits = int(q.global_scale.view(torch.int32)) & 0xFFFFFFFF
    return f"v1:{rows}x{k}:{sums[0]:016x}{sums[1]:016x}:{scale_bits:08x}"


def piece(q: QuantizedTensor, rows: slice, k: slice) -> QuantizedTensor:
    """Rows and elements along K of a quantized matrix, as views."""
    return QuantizedTensor(
        q.packed[rows, k.start // 2 : k.stop // 2],
        q.block_scale[rows, k.start // 16 : k.stop // 16],
        q.global_scale,
    )


@pytest.mark.parametrize(("rows", "k"), [(1, 16), (3, 32), (6, 96), (17, 48)], ids=str)
def test_fingerprint_equals_python_integers(rows, k):
    q = weight(rows, k)
    assert fingerprint(q) == by_integers(q)


def test_fingerprint_of_all_bytes():
    """Codes 0xFF and scale bytes up to 0xFF: no word is taken for a negative number."""
    packed = torch.arange(256, dtype=torch.uint8).flip(0).reshape(4, 64)
    scale = torch.arange(224, 256, dtype=torch.uint8).reshape(4, 8).view(torch.float8_e4m3fn)
    q = QuantizedTensor(packed, scale, torch.tensor(-1.5))
    assert fingerprint(q) == by_integers(q)


def test_fingerprint_over_several_chunks(monkeypatch):
    q = weight(17, 96)
    module = import_module("quads_common.fingerprint")  # the attribute of the package is a function
    monkeypatch.setattr(module, "_CHUNK_BLOCKS", 10)
    assert fingerprint(q) == by_integers(q)


SPLITS = {
    "rows": [(slice(0, 2), slice(0, 96)), (slice(2, 6), slice(0, 96))],
    "k": [(slice(0, 6), slice(0, 32)), (slice(0, 6), slice(32, 96))],
    "both": [
        (rows, k)
        for rows in (slice(0, 3), slice(3, 6))
        for k in (slice(0, 16), slice(16, 80), slice(80, 96))
    ],
}


def partials(q: QuantizedTensor, split: str) -> list[PartialFingerprint]:
    return [part_at(q, rows, k) for rows, k in SPLITS[split]]


def part_at(q: QuantizedTensor, rows: slice, k: slice) -> PartialFingerprint:
    shard, full = piece(q, rows, k), (q.shape[0], q.shape[1])
    return partial_fingerprint(shard, row_offset=rows.start, k_offset=k.start, full_shape=full)


@pytest.mark.parametrize("split", SPLITS)
def test_fingerprints_of_shards_combine(split):
    q = weight()
    parts = partials(q, split)
    assert combine(parts) == fingerprint(q)
    assert combine(parts[::-1]) == fingerprint(q), "another order"
    assert combine([*parts, parts[0], *parts]) == fingerprint(q), "replicas count once"


@pytest.mark.parametrize("split", SPLITS)
def test_combine_refuses_a_missing_shard(split):
    parts = partials(weight(), split)
    for i in range(len(parts)):
        rest = parts[:i] + parts[i + 1 :]
        covered = 36 - parts[i].blocks
        with pytest.raises(ValueError, match=rf"\b{covered} of 36 blocks" if rest else "no finger"):
            combine(rest)


ROWS = slice(0, 96)
OVERLAPS = {
    "more-blocks": [(slice(0, 4), ROWS), (slice(2, 6), ROWS)],
    "as-many-blocks-as-the-whole": [(slice(0, 3), ROWS), (slice(1, 4), ROWS)],
    "inside": [(slice(0, 6), ROWS), (slice(1, 2), ROWS)],
    "shard-and-its-half": [(slice(0, 4), ROWS), (slice(0, 2), ROWS)],
    "along-k": [(slice(0, 6), slice(0, 48)), (slice(0, 6), slice(32, 80))],
}


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_combine_refuses_overlapping_shards(overlap):
    """Also those whose number of blocks is right, because as many others are missing."""
    q = weight()
    parts = [part_at(q, rows, k) for rows, k in OVERLAPS[overlap]]
    with pytest.raises(ValueError, match=r"6 x 96|blocks|overlap"):
        combine(parts)


def test_combine_refuses_replicas_that_differ():
    q = weight()
    other = QuantizedTensor(q.packed ^ 1, q.block_scale, q.global_scale)
    with pytest.raises(ValueError, match="replicas"):
        combine([*partials(q, "rows"), partials(other, "rows")[0]])


def test_combine_refuses_shards_that_disagree():
    q = weight()
    first, _ = partials(q, "rows")
    rescaled = QuantizedTensor(q.packed, q.block_scale, q.global_scale * 2)
    for wrong in (partials(rescaled, "rows")[1], partial_fingerprint(q, full_shape=(12, 96))):
        with pytest.raises(ValueError, match="disagree"):
            combine([first, wrong])
    with pytest.raises(ValueError, match="no fingerprint"):
        combine([])


def test_partial_fingerprint_survives_json():
    part = partials(weight(), "both")[3]
    assert PartialFingerprint.from_json(json.loads(json.dumps(part.to_json()))) == part


def test_combine_ranks_by_name():
    up, down = weight(), quantize(normal(6, 96, seed=5))
    first, second = (
        {
            "up": [partials(up, "rows")[rank].to_json()],
            "down": [p.to_json() for p in partials(down, "both")[rank::2]],
        }
        for rank in range(2)
    )
    got = combine_ranks([first, second])
    assert got == {"up": fingerprint(up), "down": fingerprint(down)}
    with pytest.raises(ValueError, match=r"^up: .*\b24 of 36 blocks|^up: .*\b12 of 36 blocks"):
        combine_ranks([{"up": first["up"]}])


def test_differing_names_what_only_one_side_has():
    trainer = {"a": "1", "b": "2", "d": "4"}
    assert differing(trainer, {"a": "1", "b": "3", "c": "5"}) == ["b", "c", "d"]
    assert differing(trainer, dict(trainer)) == []


def test_every_flipped_bit_changes_the_fingerprint():
    q = weight(3, 32)
    seen = {fingerprint(q)}
    tensors = {
        "packed": q.packed.numel(),
        "block_scale": q.block_scale.numel(),
        "global_scale": 4,
    }
    flips = [
        (name, byte, bit) for name, n in tensors.items() for byte in range(n) for bit in range(8)
    ]
    for name, byte, bit in flips:
        fields = {key: getattr(q, key).clone() for key in tensors}
        raw = fields[name].reshape(-1).view(torch.uint8)
        raw[byte] ^= 1 << bit
        digest = fingerprint(QuantizedTensor(**fields))
        assert digest not in seen, f"bit {bit} of byte {byte} of {name}: {digest} seen before"
        seen.add(digest)


def test_swapped_blocks_rows_and_shapes_change_the_fingerprint():
    q = weight(4, 64)
    order = [1, 0, 2, 3]
    rows = QuantizedTensor(q.packed[order], q.block_scale[order], q.global_scale)
    blocks = QuantizedTensor(
        q.packed.view(4, 4, 8)[:, order].reshape(4, 32), q.block_scale[:, order], q.global_scale
    )
    reshaped = QuantizedTensor(q.packed.reshape(2, 64), q.block_scale.reshape(2, 8), q.global_scale)
    assert len({fingerprint(x) for x in (q, rows, blocks, reshaped)}) == 4


def test_fingerprint_ignores_memory_order():
    q = weight(6, 96)
    expected = fingerprint(q)
    wide = torch.zeros(6, 100, dtype=torch.uint8)
    wide[:, 3:51] = q.packed
    layouts = {
        "transposed": (q.packed.T.contiguous().T, q.block_scale.T.contiguous().T),
        "inside-another": (wide[:, 3:51], torch.stack([q.block_scale, q.block_scale])[1]),
    }
    for name, (packed, scale) in layouts.items():
        assert not packed.is_contiguous()
        assert fingerprint(QuantizedTensor(packed, scale, q.global_scale)) == expected, name


@pytest.mark.parametrize("offset", [1, 2, 3, 4])
def test_fingerprint_ignores_where_the_bytes_begin(offset):
    """Contiguous bytes inside a larger buffer need not be aligned to 32-bit words."""
    q = weight(2, 16)
    buffer = torch.zeros(offset + 16, dtype=torch.uint8)
    buffer[offset:] = q.packed.flatten()
    moved = QuantizedTensor(buffer[offset:].view(2, 8), q.block_scale, q.global_scale)
    assert fingerprint(moved) == fingerprint(q)


@pytest.mark.parametrize(
    "q",
    [quantize(normal(2, 4, 16)), quantize(normal(16)), quantize(normal(2, 16), per_token=True)],
    ids=["experts", "vector", "tokens"],
)
def test_fingerprint_refuses_what_is_no_matrix(q):
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        fingerprint(q)


@pytest.mark.gpu
def test_fingerprint_is_the_same_on_a_gpu():
    q = weight(300, 512)
    moved = QuantizedTensor(q.packed.cuda(), q.block_scale.cuda(), q.global_scale.cuda())
    assert fingerprint(moved) == fingerprint(q)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0)], ids=str)
def test_fingerprint_of_an_empty_matrix(shape):
    digest = fingerprint(quantize(torch.zeros(shape)))
    assert digest == f"v1:{shape[0]}x{shape[1]}:{0:032x}:3f800000"
