"""What the compiler makes of the kernels, for GPUs that are not there: sm_80, sm_89 and sm_90.

No multiply-add may be contracted (the contract forbids it), nothing may spill, and the loads of
weights must be wide: a stride that loses its divisibility makes a kernel several times slower.
"""

import functools
import re

import pytest

from quads_common.kernels import _gemm, _quantize, _route, _units
from quads_common.kernels.gemm import linear_config
from quads_common.kernels.moe import moe_config
from tests.kernels.offline import compile_kernel, contracted

CAPABILITIES = [80, 89, 90]
# Bytes a thread may spill. Triton 3.6's ptxas spills up to four registers for the older two.
STACK = {80: 16, 89: 16, 90: 0}
TABLES = {"ids_ptr": "*i32", "map_ptr": "*i32", "map_size": "i32", "num_experts": "i32"}
COUNTS = {"counts_ptr": "*i32", "num_slots": "i32"}


@functools.cache
def weights(capability, dtype, te_rule):
    arguments = {
        "x_ptr": dtype, "amax_ptr": "*fp32", "packed_ptr": "*u8", "scale_ptr": "*u8",
        "global_ptr": "*fp32", "flag_ptr": "*i32", "stride_matrix": "i32", "stride_row": "i32",
        "packed_matrix": "i32", "packed_row": "i32", "scale_matrix": "i32", "scale_row": "i32",
        "rows": "i32", "width": "i32", "column_tiles": "i32", "TE_RULE": te_rule, "ROWS": 4,
        "BLOCKS": 32, "CHUNKS": 4, "WIDE": True, "PTX": True,
    }  # fmt: skip
    return compile_kernel(_quantize.quantize_weight_kernel, arguments, capability, num_warps=4)


@functools.cache
def rows(capability, activation, quantize, operand, **changes):
    arguments = {
        "x_ptr": "*bf16", "factor_ptr": "*fp32", "product_ptr": "*bf16", "packed_ptr": "*u8",
        "scale_ptr": "*u8", "global_ptr": "*fp32", "operand_ptr": operand, **TABLES,
        "rows": "i32", "stride_row": "i32", "limit": "fp32", "alpha": "fp32",
        "beta": "fp32", "WIDTH": 2048, "PLANE": 256, "ACTIVATION": activation, "HAS_LIMIT": True,
        "HAS_FACTOR": activation == "none", "QUANTIZE": quantize, "PRODUCT": False,
        "PACKED": quantize, "OPERAND": True, "HAS_IDS": True, "HAS_MAP": False, "ROWS": 1,
        "BLOCKS": 128, "CHUNKS": 1, "WIDE": True, "PTX": True, "NEXT_MAY_START": capability >= 90,
    }  # fmt: skip
    return compile_kernel(
        _quantize.quantize_rows_kernel, arguments | changes, capability, num_warps=4
    )


@functools.cache
def unit(capability, dtype, last, tiled="no"):
    arguments = {
        "full_ptr": dtype, "stage_ptr": "*bf16", "packed_ptr": "*u8", "scale_ptr": "*u8",
        "global_ptr": "*fp32", "amax_ptr": "*i32", "counter_ptr": "*i32", "unit": "i32",
        "mask": "i32", "first_row": "i32", "row_offset": "i32", "block_offset": "i32",
        "FULL_ROWS": 768, "FULL_WIDTH": 2048, "STRIDE": 2048, "PART_ROWS": 768, "ROWS": 1536,
        "WIDTH": 2048, "PARTS": 2, "LAST": last, "TE_RULE": False, "TILE": 128, "PROGRAMS": 256,
        "TILED": tiled,
    }  # fmt: skip
    return compile_kernel(
        _units.take_part_kernel, arguments, capability, num_warps=8, launch_cooperative_grid=last
    )


@functools.cache
def gemm(capability, config, fp16, k, tiled="no"):
    arguments = {
        "x_ptr": "*fp16" if fp16 else "*bf16", "row_scale_ptr": "*fp32",
        "word_ptr": "*i32" if tiled == "no" else "*i64",
        "scale_ptr": "*u8", "global_ptr": "*fp32", "bias_ptr": "*bf16", "router_ptr": "*fp32",
        "y_ptr": "*bf16", "slots_ptr": "*i32", "experts_ptr": "*i32", "num_slots": "i32",
        "n": "i32", "K": k, "PLANE": -(-k // 256) * 32, "TOP_K": 8, "GROUPED": True,
        "HAS_ROW_SCALE": fp16, "HAS_BIAS": True, "HAS_ROUTER": True, "FP16": fp16,
        "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k,
        "SWAP": config.swap, "STAGES": config.stages,
        "TILED": tiled,
    }  # fmt: skip
    return compile_kernel(
        _gemm.grouped_gemm_kernel, arguments, capability, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


# The tiles that the layers choose, for many numbers of rows; gemm2 has the shorter K.
CHOSEN = {(linear_config(rows), 2048) for rows in (1, 20, 500)}
for tokens in (1, 16, 128, 256, 4096):
    both = moe_config(tokens, 8, 128)
    CHOSEN |= {(both.gemm1, 2048), (both.gemm2, 768)}
ALL_TILES = sorted(CHOSEN, key=str)


def tile_size(chosen):
    config, _ = chosen
    return (config.block_m + config.block_n) * config.block_k * config.stages


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_weight_quantizers_contract_nothing(capability):
    built = [weights(capability, "*bf16", False), weights(capability, "*fp32", True)]
    built += [unit(capability, "*bf16", True), unit(capability, "*fp32", True)]
    built += [unit(capability, "*bf16", True, "gate_up"), unit(capability, "*bf16", True, "rows")]
    for compiled in built:
        assert not contracted(compiled)
        assert compiled.stack == 0
        assert "ld.global.v4" in compiled.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    "activation, quantize, operand",
    [("none", True, "*fp16"), ("silu", True, "*fp16"), ("swigluoai", True, "*fp16"),
     ("silu", False, "*bf16")],
)  # fmt: skip
def test_row_quantizers_contract_nothing(capability, activation, quantize, operand):
    compiled = rows(capability, activation, quantize, operand)
    assert not contracted(compiled)
    assert compiled.stack <= STACK[capability]


@pytest.mark.parametrize("activation, allowed", [("none", 18.9), ("silu", 33.6)])
def test_codes_of_many_rows_take_few_instructions(activation, allowed):
    """Rows of 2048 in 4 chunks: 64 elements a thread, read 16 bytes at a time.

    An H200 copies 17.3 bytes per clock and multiprocessor, in which time it issues 128
    instructions. Codes take 2.56 bytes an element, 4.56 with SiLU: so many instructions an element
    would keep up with a copy.
    """
    compiled = rows(
        90, activation, True, "*fp16", ROWS=4, BLOCKS=32, CHUNKS=4, OPERAND=False, HAS_IDS=False,
        HAS_LIMIT=False, HAS_FACTOR=False,
    )  # fmt: skip
    lines = re.findall(r"/\*[0-9a-f]{4,5}\*/ +(.*) ;", compiled.sass())
    assert sum(not line.startswith("NOP") for line in lines) / 64 < allowed
    assert not contracted(compiled)
    assert compiled.stack == 0
    assert compiled.ptx.count("ld.global.v4.b32") == {"none": 8, "silu": 16}[activation]


def test_units_run_two_programs_on_a_multiprocessor():
    """The launch is cooperative: 2 programs of 8 warps need 128 registers a thread at most."""
    for capability in CAPABILITIES:
        for last, tiled in ((False, "no"), (True, "no"), (True, "gate_up")):
            compiled = unit(capability, "*bf16", last, tiled)
            assert compiled.registers <= 128
            assert ("atom.global.gpu.acq_rel.add" in compiled.ptx) == last


@pytest.mark.parametrize("tiled", [False, True], ids=["canonical", "tiled"])
@pytest.mark.parametrize("fp16", [True, False], ids=["W4A4", "W4A16"])
@pytest.mark.parametrize("config, k", ALL_TILES, ids=str)
def test_gemms_do_not_spill(config, k, fp16, tiled):
    tiled = ("rows" if k == 768 else "gate_up") if tiled else "no"
    compiled = gemm(90, config, fp16, k, tiled)
    assert compiled.stack == 0
    assert not contracted(compiled)
    assert re.search(r"cp\.async\.cg\.shared\.global .* 0x10,", compiled.ptx)  # weights
    assert compiled.shared <= 227 * 1024


@pytest.mark.parametrize("capability, shared", [(80, 163), (89, 99)])
@pytest.mark.parametrize("config, k", [ALL_TILES[0], max(ALL_TILES, key=tile_size)], ids=str)
def test_gemms_fit_older_gpus(capability, shared, config, k):
    compiled = gemm(capability, config, True, k)
    assert compiled.stack <= STACK[capability]
    assert compiled.shared <= shared * 1024
    assert "wgmma" not in compiled.ptx


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("ids, mapped", [("*i32", True), ("*i64", True), ("*i64", False)])
def test_routing_compiles(capability, ids, mapped):
    tables = {**TABLES, "ids_ptr": ids}
    shared = {"HAS_MAP": mapped, "CHUNK": 1024, "BINS": 256}
    for kernel, arguments in (
        (_route.count_routes, {**tables, **COUNTS, **shared}),
        (_route.place_routes, {
            **tables, **COUNTS, **shared, "slots_ptr": "*i32", "experts_ptr": "*i32",
            "chunks": "i32", "max_blocks": "i32", "ONE_CHUNK": False, "BLOCK_M": 16,
        }),
        (_route.sum_slots, {
            **tables, "slots_ptr": "*fp32", "out_ptr": "*bf16", "width": "i32", "HAS_MAP": mapped,
            "TOP_K": 8, "BLOCK": 1024, "EARLY": capability >= 90,
        }),
    ):  # fmt: skip
        compiled = compile_kernel(kernel, arguments, capability, num_warps=4)
        assert compiled.stack == 0
        assert not contracted(compiled)
