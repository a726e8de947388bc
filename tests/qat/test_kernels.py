"""The Triton path equals the torch path: in the interpreter, and on a GPU where there is one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quads_common.format import GLOBAL_SCALE_RULES
from quads_common.qat.effective import check_amax, effective_weight_ref, matrix_amax_ref
from quads_common.quantize import dequantize, quantize
from tests.common.bits import assert_same_bits
from tests.common.samples import DISTRIBUTIONS, random_bf16
from tests.qat import interpreted_kernels

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(*arguments, **environment):
    path = os.pathsep.join([str(ROOT / "common"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "tests.qat.interpreted_kernels", *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_kernels_equal_torch_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_interpreted(TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "312 comparisons, all equal\n"


@pytest.mark.gpu
def test_kernels_equal_torch_on_this_gpu():
    assert interpreted_kernels.main("cuda") > 312


@pytest.mark.parametrize("is_bf16", [True, False], ids=["bf16", "fp32"])
def test_kernels_compile_for_hopper_without_contraction(is_bf16):
    """Multiply-adds would change scale bytes, flushed subnormals too; spills would cost time."""
    pytest.importorskip("triton")
    from quads_common.qat._fake_quantize_kernel import amax_kernel, fake_quantize_kernel
    from tests.kernels.offline import compile_kernel, contracted

    pointer = "*i16" if is_bf16 else "*fp32"
    shape = {"IS_BF16": is_bf16, "weight": pointer}
    amax = shape | {"amax_bits": "*i32", "matrix_elements": "i32", "TILE": 16384}
    fake = shape | {"amax": "*fp32", "out": pointer, "matrix_blocks": "i32"}
    fake |= {"TE_RULE": False, "OUT_BF16": is_bf16, "ROWS": 64}
    for kernel, arguments in ((amax_kernel, amax), (fake_quantize_kernel, fake)):
        compiled = compile_kernel(kernel, arguments, 90, num_warps=8)
        assert not contracted(compiled) and ".ftz" not in compiled.ptx
        assert "ld.global.v4.b32" in compiled.ptx, "loads of 16 bytes"
        assert compiled.stack == 0, f"{compiled.stack=}"


@pytest.mark.parametrize("rule", GLOBAL_SCALE_RULES)
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_reference_is_dequantize_of_quantize(distribution, rule):
    x = random_bf16(distribution)[:64]
    values = effective_weight_ref(x, matrix_amax_ref(x), rule, torch.float32)
    expected = dequantize(quantize(x, global_scale_rule=rule), torch.float32)
    assert_same_bits(values, expected, distribution)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "3.38e38"])
def test_reference_poisons_a_matrix_or_a_block(value):
    x = torch.randn(2, 4, 32)
    x[1, 2, 20] = float(value)
    amax = matrix_amax_ref(x)
    assert amax[0] == x[0].to(torch.bfloat16).abs().max() and amax[1] == float("inf")
    values = effective_weight_ref(x, amax, "pow2", torch.float32)
    assert values[0].isfinite().all() and values[1].isnan().all()
    values = effective_weight_ref(x, torch.ones(2), "pow2", torch.float32)
    bad = torch.zeros(2, 4, 32, dtype=torch.bool)
    bad[1, 2, 16:] = True
    assert torch.equal(values.isnan(), bad)


def test_check_amax_names_what_is_bad():
    inf = float("inf")
    check_amax([], [])
    check_amax([torch.ones(3), torch.tensor(2.0)], ["a", "b"])
    with pytest.raises(ValueError, match=r"^a\[1\], b: NaN or Inf"):
        check_amax([torch.tensor([1.0, inf]), torch.tensor(float("nan"))], ["a", "b"])
    with pytest.raises(ValueError, match=r"a\[4\] and 4 more"):
        check_amax([torch.full((9,), inf)], ["a"])
