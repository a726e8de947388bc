"""Import rules. They are checked on source text, so they hold without an engine or a GPU.

format <- packing, swizzle, quantize <- gemm, moe      (inside quads_common)
quads_common <- vllm_quads        quads_common <- sglang_quads        quads_common <- quads_trainers
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Source tree -> top-level names it may not import, lazily neither. `common` is only a folder.
FORBIDDEN = {
    "common/quads_common": {
        "common",
        "vllm",
        "sglang",
        "vllm_quads",
        "sglang_quads",
        "quads_trainers",
        "transformers",
    },
    "common/quads_trainers": {"common", "vllm", "sglang", "vllm_quads", "sglang_quads"},
    "vllm_quads": {"common", "sglang", "sglang_quads", "quads_trainers"},
    "sglang_quads": {"common", "vllm", "vllm_quads", "quads_trainers"},
}
PACKAGES = ["quads_common", "quads_trainers", "vllm_quads", "sglang_quads"]
ENGINE_PACKAGES = ["vllm_quads", "sglang_quads"]
# Largest E4M3 and largest encodable NVFP4 magnitude: who writes them does scale arithmetic.
FORMAT_CONSTANTS = {448, 2688}


def nodes(tree: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every syntax node of every file of a source tree, nested ones included."""
    paths = sorted((ROOT / tree).rglob("*.py"))
    assert paths, f"{tree} holds no Python file"
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            yield path, node


def imported_roots(node: ast.AST) -> set[str]:
    """Top-level names that an absolute import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        return {node.module.partition(".")[0]}
    return set()


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


@pytest.mark.parametrize("tree", FORBIDDEN)
def test_import_direction(tree):
    bad = {
        where(path, node): names
        for path, node in nodes(tree)
        if (names := imported_roots(node) & FORBIDDEN[tree])
    }
    assert not bad


@pytest.mark.parametrize("tree", ENGINE_PACKAGES)
def test_engine_packages_do_no_format_arithmetic(tree):
    """Format facts and nibble shifts belong in quads_common, where both engines get the same."""
    bad = [
        where(path, node)
        for path, node in nodes(tree)
        if (isinstance(node, ast.Constant) and node.value in FORMAT_CONSTANTS)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.RShift | ast.LShift))
    ]
    assert not bad


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_light(package):
    """A bare import, in a fresh process, loads no engine and no kernel compiler, and no CUDA."""
    code = (
        f"import sys, {package}\n"
        "heavy = {'vllm', 'sglang', 'transformers', 'triton'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    path = os.pathsep.join([str(ROOT / "common"), str(ROOT)])
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": path})
