"""Every launch of a Triton kernel forbids contracted multiply-adds: the source text."""

import ast
from pathlib import Path

import pytest

import quads_common

FOLDER = Path(quads_common.__file__).parent
# The call of Triton's interpreter in units.py, which compiles nothing.
INTERPRETED = {"kernel"}


def last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def compiled_functions(trees: list[ast.Module]) -> set[str]:
    """Functions that Triton compiles and no other such function calls."""
    compiled, called = set(), set()
    for tree in trees:
        for function in tree.body:
            if isinstance(function, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in function.decorator_list
            ):
                compiled.add(function.name)
                called |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    return compiled - called


def launches(trees: list[ast.Module], kernels: set[str]) -> list[tuple[str, bool]]:
    """Of each the name, and whether ``enable_fp_fusion=False`` stands in the call."""
    found = []
    for call in (n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = ""
        if isinstance(call.func, ast.Subscript):  # kernel[grid](...)
            name = last_name(call.func.value)
        elif isinstance(call.func, ast.Attribute) and call.func.attr == "warmup":
            name = "take_part_kernel"
        if name in kernels | INTERPRETED:
            flags = [ast.unparse(k.value) for k in call.keywords if k.arg == "enable_fp_fusion"]
            found.append((name, flags == ["False"]))
    return found


@pytest.fixture(scope="module")
def trees():
    return [ast.parse(file.read_text()) for file in sorted(FOLDER.rglob("*.py"))]


def test_no_launch_contracts(trees):
    kernels = compiled_functions(trees)
    found = launches(trees, kernels)
    assert {name for name, _ in found} - INTERPRETED == kernels
    assert {name for name, forbidden in found if not forbidden} <= INTERPRETED


def test_what_contracts_is_found():
    text = """
@triton.jit
def good(x): pass
@triton.jit
def bad(x): pass
def run():
    good[(1,)](x, enable_fp_fusion=False)
    module.bad[grid](x, enable_fp_fusion=True)
    bad[grid](x)
    table[0](x)
"""
    trees = [ast.parse(text)]
    assert launches(trees, compiled_functions(trees)) == [
        ("good", True),
        ("bad", False),
        ("bad", False),
    ]
