"""Compiles what the backend ``blackwell`` launches with the Triton of this process.

    python -m tests.kernels.blackwell.compile_fp4 FOLDER

Writes a cubin per case, those of ``launch_fp4`` and ``cases.json`` into FOLDER. Run it in a process
of its own: after a failed assertion of the compiler nothing in it can be trusted.
"""

import json
import re
import sys
from pathlib import Path

import triton

from quads_common.kernels.blackwell import _gemm
from quads_common.kernels.blackwell.gemm import fp4_config, splice_tile
from tests.kernels.blackwell.launch_fp4 import launched
from tests.kernels.offline import Compiled, compile_kernel

TILES = (16, 32, 64, 128)
# kind: residual, hot columns
KINDS = {
    "plain": (False, "none"),
    "rac": (True, "none"),
    "dequant": (False, "dequant"),
    "bf16": (False, "bf16"),
    "rac-dequant": (True, "dequant"),
    "rac-bf16": (True, "bf16"),
}
CHANNELS = {2048: 64, 768: 32, 720: 32}


def main(folder: Path) -> None:
    """Compile every case; the first failure ends the process."""
    found = {"triton": triton.__version__, "cases": {}}
    for name, case in cases().items():
        compiled = case()
        (folder / f"{name}.cubin").write_bytes(compiled.cubin)
        found["cases"][name] = {
            "target": re.search(r"\.target (\w+)", compiled.ptx)[1],
            "threads": int(re.search(r"\.(?:req|max)ntid (\d+)", compiled.ptx)[1]),
            "registers": compiled.registers,
            "stack": compiled.stack,
            "shared": compiled.shared,
            "contracted": len(re.findall(r"fma\.rn\.f32", compiled.ptx)),
        }
    for capability in (100, 120):
        for name, cubin in launched(capability).items():
            (folder / f"{name}.cubin").write_bytes(cubin)
    (folder / "cases.json").write_text(json.dumps(found))


def cases() -> dict:
    """Name ``sm_<capability> <kernel> <kind> <tile> <K>`` to what compiles it."""
    wanted = [(c, "plain", tile, 2048) for c in (100, 120) for tile in TILES]
    wanted += [(103, "plain", tile, 2048) for tile in (16, 128)]
    for capability in (100, 120):
        wanted += [(capability, kind, 16, 2048) for kind in KINDS if kind != "plain"]
        wanted += [(capability, kind, 128, 768) for kind in ("dequant", "bf16")]
        wanted += [(capability, kind, 64, 768) for kind in ("rac", "rac-dequant", "rac-bf16")]
        wanted += [(capability, "rac-dequant", 32, 2048)]
        wanted += [(capability, "rac-dequant", 16, 720)]  # K that no tile divides
    wanted += [(103, "rac-dequant", 16, 2048), (103, "rac-bf16", 64, 768)]
    found = {}
    for capability, kind, tile, k in wanted:
        name = f"sm_{capability} fp4 {kind} {tile} {k}"
        found[name] = lambda a=(capability, kind, tile, k): fp4_gemm(*a)
    return found


def fp4_gemm(capability: int, kind: str, tile: int, k: int) -> Compiled:
    """The grouped GEMM with bias and router, the most that it can have to do."""
    residual, hot = KINDS[kind]
    channels = CHANNELS[k] if hot != "none" else 0
    config = fp4_config(tile, k, residual)
    arguments = {
        "x_ptr": "*u8", "x_scale_ptr": "*fp8e4nv", "row_scale_ptr": "*fp32", "hot_ptr": "*bf16",
        "w_ptr": "*u8", "w_scale_ptr": "*fp8e4nv", "global_ptr": "*fp32", "mask_ptr": "*u8",
        "channels_ptr": "*i32", "columns_ptr": "*bf16", "bias_ptr": "*bf16", "router_ptr": "*fp32",
        "y_ptr": "*bf16", "slots_ptr": "*i32", "experts_ptr": "*i32", "num_rows": "i32",
        "num_slots": "i32", "n": "i32", "alpha": "fp32", "K": k, "CHANNELS": channels, "TOP_K": 8,
        "GROUPED": True, "MANY_MASKS": k != 2048, "MANY_LISTS": k != 2048,
        "RESIDUAL": residual, "HOT": hot, "HAS_BIAS": True, "HAS_ROUTER": True,
        "BLOCK_M": config.block_m, "BLOCK_K": config.block_k,
        "BLOCK_C": splice_tile(channels, hot), "PADDED": triton.next_power_of_2(k // 16),
        "STAGES": config.stages,
    }  # fmt: skip
    return compile_kernel(
        _gemm.grouped_fp4_kernel, arguments, capability, num_warps=config.warps,
        num_stages=config.stages,
    )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
