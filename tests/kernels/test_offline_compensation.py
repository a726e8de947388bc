"""What the compiler makes of the compensation kernels for sm_80, sm_89 and sm_90.

No multiply-add may be contracted, and nothing may spill on sm_90. The quantizers ask for some whose
products are exact.
"""

import functools
import re

import pytest
import triton

from quads_common.kernels import _compensated, _compensated_gemm, _statistics
from quads_common.kernels.compensated_gemm import exact_config
from quads_common.kernels.compensated_rows import FEW_ROWS, MAX_CHUNKS
from quads_common.kernels.gemm import linear_config
from quads_common.kernels.moe import moe_config
from quads_common.kernels.rows import row_tile
from quads_common.kernels.statistics import CHUNK, ROW_BLOCKS, TILE_BLOCKS, WARPS
from tests.kernels.offline import compile_kernel, contracted

CAPABILITIES = [80, 89, 90]
STACK = {80: 16, 89: 16, 90: 0}
STATISTICS_STACK = 40
TABLES = {"ids_ptr": "*i32", "map_ptr": "*i32", "map_size": "i32"}
ACTIVATION = {"limit": "fp32", "act_alpha": "fp32", "beta": "fp32", "HAS_LIMIT": False}
ROWS = {"stride_row": "i32", "HAS_IDS": True, "HAS_MAP": False, "HAS_FACTOR": False}


@functools.cache
def rows(capability, activation, width, rac, hot, exact, number, scaled=False):
    tile = row_tile(number, width, FEW_ROWS, MAX_CHUNKS)
    bits = activation != "none"  # the first input's list is one, the second's are many
    arguments = {
        "x_ptr": "*bf16", "factor_ptr": "*fp32", "block_mask_ptr": "*u8", "channels_ptr": "*i32",
        "bits_ptr": "*i32",
        "operand_ptr": "*fp16", "global_ptr": "*fp32", "hot_ptr": "*bf16", "packed_ptr": "*u8",
        "scale_ptr": "*u8", "residual_packed_ptr": "*u8", "residual_scale_ptr": "*u8",
        "sample_ptr": "*i32", "staged_ptr": "*bf16", "staged_group_ptr": "*i32", **TABLES,
        **ACTIVATION, **ROWS, "num_experts": "i32", "rows": "i32", "alpha": "fp32",
        "WIDTH": width, "PLANE": -(-width // 256) * 32,
        "PARTS": 1 + (exact and rac) + (hot == "part"), "ACTIVATION": activation, "RAC": rac,
        "CHANNELS": 0 if hot == "none" else 64, "MANY_MASKS": True, "MANY_LISTS": bits,
        "FOLD_RESIDUAL": not exact, "HOT": hot, "SLOTS": 64, "PACKED": exact,
        "STAGED": 8 if bits else 1, "SCALED": scaled, "ROWS": tile.rows, "BLOCKS": tile.blocks,
        "CHUNKS": tile.chunks, "WIDE": True, "PTX": True,
        "NEXT_MAY_START": capability == 90 and not bits,
    }  # fmt: skip
    return compile_kernel(
        _compensated.compensate_rows_kernel, arguments, capability, num_warps=tile.warps
    )


@functools.cache
def counted(capability, width, groups, channels, per_channel):
    """The kernels that measure and count rows."""
    shape = {
        "table_ptr": "*i64", "found_ptr": "*i32", "rows": "i32", "WIDTH": width,
        "DTYPE": triton.language.bfloat16, "SPLICE": channels > 0, "MANY": groups > 1,
    }  # fmt: skip
    measure = {"offered": "i32", "GROUPS": groups, "BLOCKS": ROW_BLOCKS}
    observe = {"alpha": "fp32", "PER_CHANNEL": per_channel, "CHUNK": CHUNK, "BLOCKS": TILE_BLOCKS}
    return [
        compile_kernel(kernel, {**shape, **own}, capability, num_warps=WARPS)
        for kernel, own in (
            (_statistics.measure_rows_kernel, measure),
            (_statistics.observe_kernel, observe),
        )
    ]


@functools.cache
def gemm(capability, config, k, stored, channels, tiled="no"):
    hot = stored == 3
    arguments = {
        "x_ptr": "*bf16" if hot else "*fp16", "row_scale_ptr": "*fp32", "hot_ptr": "*bf16",
        "word_ptr": "*i32" if tiled == "no" else "*i64", "scale_ptr": "*u8", "global_ptr": "*fp32",
        "column_ptr": "*bf16", "bias_ptr": "*bf16", "router_ptr": "*fp32", "y_ptr": "*bf16",
        "slots_ptr": "*i32",
        "experts_ptr": "*i32", "num_slots": "i32", "n": "i32", "rac_alpha": "fp32", "K": k,
        "PLANE": k // 8, "STORED": stored, "PARTS": {1: 1, 2: 2, 3: 4}[stored], "RAC": stored > 1,
        "HOT": hot, "CHANNELS": channels, "BLOCK_C": 32, "TOP_K": 8, "GROUPED": True,
        "HAS_BIAS": True, "HAS_ROUTER": True, "FP16": not hot, "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "STAGES": config.stages,
        "TILED": tiled,
    }  # fmt: skip
    return compile_kernel(
        _compensated_gemm.compensated_gemm_kernel, arguments, capability, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


ROW_FORMS = [
    ("none", 2048, True, "none", False),
    ("none", 2048, True, "fold", False),
    ("silu", 768, True, "fold", False),
    ("silu", 768, False, "list", False),
    ("silu", 768, True, "part", True),
]


@pytest.mark.parametrize("capability, number", [(80, 1), (89, 1), (90, 1), (90, 4096)])
@pytest.mark.parametrize("form", ROW_FORMS, ids=str)
def test_quantizers_contract_nothing(form, capability, number):
    compiled = rows(capability, *form, number)
    _, width, rac, hot, exact = form
    # One an element where hot values are folded in, one where the residual is.
    asked = (hot == "fold") + (rac and not exact)
    chunks = row_tile(number, width, FEW_ROWS, MAX_CHUNKS).chunks
    assert len(contracted(compiled)) == 16 * chunks * asked
    assert compiled.stack <= STACK[capability]
    # Three programs of 128 threads on a multiprocessor.
    assert compiled.registers <= 168
    assert compiled.ptx.count("ld.global.v4.b32") >= chunks * (4 if form[0] == "silu" else 2)


def test_residuals_times_alpha_contract_nothing():
    assert not contracted(rows(90, "none", 2048, True, "none", False, 1, True))


@pytest.mark.parametrize(
    "form, number, allowed",
    [(("none", 2048, True, "none", False), 1, 42),
     (("none", 2048, True, "fold", False), 1, 53),
     (("none", 2048, True, "none", False), 4096, 37),
     (("silu", 768, True, "none", False), 4096, 50),
     (("silu", 768, True, "fold", False), 4096, 65),
     (("silu", 768, False, "list", False), 4096, 49)],
    ids=str,
)  # fmt: skip
def test_quantizers_take_few_instructions(form, number, allowed):
    """An element, static; before blocks lay in threads they were 61, 76, 61, 89, 105 and 73."""
    compiled = rows(90, *form, number)
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/ +(.*) ;", compiled.sass())
    elements = 16 * row_tile(number, form[1], FEW_ROWS, MAX_CHUNKS).chunks
    assert sum(not line.startswith("NOP") for line in lines) / elements < allowed


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "form",
    [(2048, 1, 64, False), (2048, 1, 0, False), (768, 128, 32, True), (12288, 1, 0, False)],
    ids=str,
)
def test_statistics_contract_nothing(form, capability):
    measure, observe = counted(capability, *form)
    for compiled in (measure, observe):
        assert not contracted(compiled)
        assert "fma.rn.f64" not in compiled.ptx
        # Around the division's slow path; these kernels run between forwards, and seldom.
        assert compiled.stack <= STATISTICS_STACK
    assert re.search(r"ld\.global\.v[24]\.b32", observe.ptx), "addresses of a table are aligned"
    # One atomic, which counts programs exactly: no sum depends on the order in which those come.
    assert re.findall(r"\batom\.\S+", observe.ptx) == ["atom.global.gpu.acq_rel.add.f64"]
    assert "atom." not in measure.ptx


TILES = {(linear_config(rows), 2048) for rows in (1, 20, 500)}
TILED = set()
for tokens in (1, 16, 128, 256, 4096):
    both = moe_config(tokens, 8, 128)
    TILES |= {(both.gemm1, 2048), (both.gemm2, 768)}
    TILED |= {(both.gemm1, 2048, "gate_up"), (both.gemm2, 768, "rows")}


@pytest.mark.parametrize(
    "stored, channels", [(2, 0), (3, 0), (1, 64)], ids=["rac", "splice-rac", "columns"]
)
@pytest.mark.parametrize("config, k", sorted(TILES, key=str), ids=str)
def test_gemms_do_not_spill(config, k, stored, channels):
    tile = config if stored == 1 else exact_config(config, stored)
    compiled = gemm(90, tile, k, stored, channels)
    assert compiled.stack == 0
    assert not contracted(compiled)
    assert re.search(r"cp\.async\.cg\.shared\.global .* 0x10,", compiled.ptx)  # weights
    assert compiled.shared <= 227 * 1024


def test_gemms_of_tiled_weights_do_not_spill():
    config = exact_config(moe_config(128, 8, 128).gemm1, 2)
    compiled = gemm(90, config, 2048, 2, 0, "gate_up")
    assert compiled.stack == 0
    assert not contracted(compiled)


@pytest.mark.parametrize("config, k, order", sorted(TILED, key=str), ids=str)
def test_tiled_columns_do_not_spill(config, k, order):
    compiled = gemm(90, config, k, 1, 64, order)
    assert compiled.stack == 0
    assert not contracted(compiled)


@pytest.mark.parametrize("capability, shared", [(80, 163), (89, 99)])
@pytest.mark.parametrize("stored, channels", [(3, 0), (1, 64)], ids=["splice-rac", "columns"])
def test_gemms_fit_older_gpus(capability, shared, stored, channels):
    config = moe_config(4096, 8, 128).gemm1
    tile = config if stored == 1 else exact_config(config, stored)
    compiled = gemm(capability, tile, 2048, stored, channels)
    assert compiled.stack <= STACK[capability]
    assert compiled.shared <= shared * 1024
