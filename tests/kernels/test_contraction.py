"""Every launch of a Triton kernel forbids contracted multiply-adds, as the contract does."""

import ast
from pathlib import Path

from quads_common import kernels

FOLDER = Path(kernels.__file__).parent


def launches(source: str) -> list[ast.Call]:
    """``kernel[grid](..)`` and ``kernel.warmup(..)``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call
        for call in calls
        if isinstance(call.func, ast.Subscript)
        or (isinstance(call.func, ast.Attribute) and call.func.attr == "warmup")
    ]


def forbids(call: ast.Call) -> bool:
    given = [k.value for k in call.keywords if k.arg == "enable_fp_fusion"]
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is False


def test_launches_forbid_contraction():
    found = {
        f"{path.relative_to(FOLDER)}:{call.lineno}": forbids(call)
        for path in FOLDER.rglob("*.py")
        for call in launches(path.read_text(encoding="utf-8"))
    }
    assert {place.split(":")[0] for place in found} >= {"gemm.py", "route.py", "units.py"}
    assert [place for place, good in found.items() if not good] == []
