"""The memory order of tiled weights, against its description; units that are stored so."""

import pytest
import torch

from quads_common.fingerprint import fingerprint
from quads_common.format import QuantizedTensor
from quads_common.quantize import quantize
from quads_common.weight_tiles import TileLayout
from quads_common.weight_units import Piece, Region, WeightUnits

LAYOUTS = [TileLayout(gate_up=True), TileLayout(gate_up=False)]
SIGN_BITS, MAGNITUDE_BITS = (15, 12, 14, 13), (9, 6, 3, 0)


def random_weight(*shape: int) -> QuantizedTensor:
    """Every byte of codes and every finite scale may occur."""
    *lead, rows, k = shape
    packed = torch.randint(0, 256, (*lead, rows, k // 2), dtype=torch.uint8)
    scale = torch.randint(0, 127, (*lead, rows, k // 16), dtype=torch.uint8)
    return QuantizedTensor(packed, scale.view(torch.float8_e4m3fn), torch.rand(tuple(lead)))


def place_in_tile(layout: TileLayout, rows: int, row: int) -> tuple[int, int]:
    """Row of tiles and place in it, as the module describes them."""
    if layout.gate_up:
        half, row = divmod(row, rows // 2)
        return row // 16, half * 16 + row % 16
    return row // 32, row % 4 * 8 + row % 32 // 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
@pytest.mark.parametrize("shape", [(96, 384), (2, 64, 128), (3, 32, 256)], ids=str)
def test_untile_undoes_tile(layout, shape):
    q = random_weight(*shape)
    before = q.packed.clone()
    back = layout.untile(layout.tile(q))
    assert torch.equal(back.packed, before)
    assert torch.equal(q.packed, before)
    assert torch.equal(back.block_scale.view(torch.uint8), q.block_scale.view(torch.uint8))
    assert torch.equal(back.global_scale, q.global_scale)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_each_code_and_scale_is_where_it_is_said_to_be(layout):
    rows, k = 64, 256
    q = random_weight(2, rows, k)
    tiled = layout.tile(q)
    codes = torch.stack([q.packed & 15, q.packed >> 4], -1).flatten(-2)
    for expert in range(2):
        stored = tiled.packed[expert].flatten().tolist()
        scales = tiled.block_scale[expert].view(torch.uint8).flatten().tolist()
        for row in range(rows):
            tile_row, place = place_in_tile(layout, rows, row)
            for block in range(k // 16):
                tile = tile_row * (k // 128) + block // 8
                at = tile * 256 + place * 8 + block % 8
                assert scales[at] == q.block_scale[expert, row, block].view(torch.uint8)
                units = [stored[at * 8 + 2 * u] | stored[at * 8 + 2 * u + 1] << 8 for u in range(4)]
                for i in range(16):
                    unit = units[(0, 2, 1, 3).index(i // 4)]
                    sign = unit >> SIGN_BITS[i % 4] & 1
                    magnitude = unit >> MAGNITUDE_BITS[i % 4] & 7
                    assert sign << 3 | magnitude == codes[expert, row, block * 16 + i]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
@pytest.mark.parametrize("count", [0, 1, 16, 20, 48])
def test_each_bf16_column_is_where_it_is_said_to_be(layout, count):
    rows = 96
    columns = torch.randn(2, rows, count).bfloat16()
    tiled = layout.tile_columns(columns)
    assert tiled.shape == columns.shape
    for expert in range(2):
        stored = tiled[expert].flatten()
        for row in range(rows):
            tile, place = place_in_tile(layout, rows, row)
            first = (tile * 4 + place // 8) * 8 * count
            for c in range(count):
                together = min(16, count - c // 16 * 16)
                at = first + c // 16 * 128 + place % 8 * together + c % 16
                assert stored[at] == columns[expert, row, c]
    assert torch.equal(layout.untile_columns(tiled), columns)


def test_columns_of_other_shapes_are_refused():
    message = r"tiled columns need rows in multiples of 32, got \[2, 48, 16\]"
    with pytest.raises(ValueError, match=message):
        TileLayout(True).tile_columns(torch.zeros(2, 48, 16))
    with pytest.raises(ValueError, match=message):
        TileLayout(True).untile_columns(torch.zeros(2, 48, 16))


@pytest.mark.parametrize("shape", [(48, 128), (32, 192), (0, 128), (32, 0)], ids=str)
def test_other_shapes_are_refused(shape):
    assert not TileLayout(False).fits(*shape)
    with pytest.raises(ValueError, match=r"rows in multiples of 32 and K in multiples of 128"):
        TileLayout(False).tile(random_weight(*shape))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.order)
def test_units_in_tiles_are_canonical_outside(layout):
    """Fingerprints and what ``quantized`` returns do not tell the order; the storage does."""
    weight = torch.randn(64, 128)
    want = quantize(weight)
    packed = torch.zeros((1, 64, 64), dtype=torch.uint8)
    scale = torch.zeros((1, 64, 8), dtype=torch.uint8).view(torch.float8_e4m3fn)
    regions = [Region("w", 0, 64, 0, 0, (64, 128))]
    units = WeightUnits(
        "layer.w", ("w",), packed, scale, torch.ones(1), lambda unit: regions, layout=layout
    )
    assert units.load(0, "w", weight, "w", Piece(64))
    got = units.quantized(0)
    assert torch.equal(got.packed, want.packed)
    assert torch.equal(got.block_scale.view(torch.uint8), want.block_scale.view(torch.uint8))
    assert torch.equal(packed[0], layout.tile(want).packed)
    assert not torch.equal(packed[0], want.packed)
    (part,) = units.fingerprints(0)["w"]
    assert fingerprint(want).split(":")[2] == f"{part.sums[0]:016x}{part.sums[1]:016x}"
