"""The CUDA C++ kernels without a GPU: what NVRTC makes of them, the cache, the choice of a form.

What they compute is compared on a GPU only: ``tests/gpu/check_hopper.py``.
"""

import ctypes
import re

import pytest
import torch

from quads_common.activation import Activation
from quads_common.kernels import gemm, hopper
from quads_common.kernels.cuda import nvrtc
from quads_common.kernels.cuda.cubin_cache import CACHE_VARIABLE
from quads_common.kernels.hopper import DecodePlan, decode_plan, moe_defines, why_not_hopper
from quads_common.kernels.hopper_memory import ALL_SHARED, FEW_SHARED, SHARED, launches
from quads_common.kernels.moe import moe_config
from tests.kernels.offline import cuobjdump

try:
    nvrtc.Nvrtc()
    NO_NVRTC = ""
except RuntimeError as error:
    NO_NVRTC = str(error)

needs_nvrtc = pytest.mark.skipif(bool(NO_NVRTC), reason=NO_NVRTC)

# H, I of Qwen3-30B-A3B, Qwen3-235B at TP4 and GLM-4.5-Air.
SHAPES = [(2048, 768), (4096, 384), (4096, 1408)]
SILU = Activation()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cubins"))
    return tmp_path / "cubins"


@needs_nvrtc
@pytest.mark.parametrize(
    "shape, dtype",
    [(SHAPES[0], torch.float16), (SHAPES[2], torch.float16), (SHAPES[0], torch.bfloat16)],
    ids=str,
)
def test_kernels_do_not_spill(cache, shape, dtype):
    cubin = nvrtc.compile_cubin("moe", "sm_90a", moe_defines(dtype, *shape, False))
    usage = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)",
        cuobjdump(cubin, "-res-usage"),
    )
    assert {name for name, *_ in usage} == set(hopper.KERNELS)
    for name, registers, stack, shared, local in usage:
        assert (stack, local) == ("0", "0"), name
        assert int(registers) <= 128, name  # 512 threads share 65536
        of_rows = FEW_SHARED if name.endswith("_few") else SHARED
        assert int(shared) + of_rows <= ALL_SHARED, name
    sass = cuobjdump(cubin, "-sass")
    suffix = ".BF16" if dtype == torch.bfloat16 else ""
    assert set(re.findall(r"HMMA[.\w]*", sass)) == {f"HMMA.16816.F32{suffix}"}
    assert "LDG.E.NA.128.CONSTANT" in sass  # weights
    assert "UBLKCP" in sass  # activations, by the copy engine


@needs_nvrtc
def test_cubins_are_cached_by_what_they_depend_on(cache, monkeypatch):
    defines = moe_defines(torch.float16, 128, 128, False)
    first = nvrtc.compile_cubin("moe", "sm_90a", defines)
    assert [file.read_bytes()[:-32] for file in cache.iterdir()] == [first]
    monkeypatch.setattr(nvrtc.Nvrtc, "compile", lambda *args: b"compiled again")
    assert nvrtc.compile_cubin("moe", "sm_90a", defines) == first
    other = moe_defines(torch.float16, 128, 256, False)
    assert nvrtc.compile_cubin("moe", "sm_90a", other) == b"compiled again"
    assert nvrtc.compile_cubin("moe", "sm_90", defines) == b"compiled again"
    assert len(list(cache.iterdir())) == 3  # and no temporary files


@needs_nvrtc
def test_compiler_messages_are_shown(cache):
    defines = moe_defines(torch.float16, 128, 128, False) | {"ARGUMENT_BYTES": "1"}
    with pytest.raises(RuntimeError, match="the launcher knows another structure"):
        nvrtc.compile_cubin("moe", "sm_90a", defines)
    assert not cache.exists()


@pytest.mark.parametrize(
    "cuda, package", [("13.0", "nvidia-cuda-nvrtc"), ("12.8", "nvidia-cuda-nvrtc-cu12")]
)
def test_missing_nvrtc_is_an_error(monkeypatch, cuda, package):
    def no_library(name, mode=0):
        raise OSError(name)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(nvrtc.glob, "glob", lambda *args, **kwargs: [])
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    message = rf"NVRTC {cuda[:2]}, which was not found: pip install {package}, or use backend"
    with pytest.raises(RuntimeError, match=message):
        nvrtc.Nvrtc()


def packaged(folder, content: bytes) -> None:
    """An NVRTC as the wheels bring it."""
    library = folder / "nvidia" / "cu13" / "lib" / "libnvrtc.so.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(content)


def test_nvrtc_is_found_in_folders_with_brackets(monkeypatch, tmp_path):
    loaded = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, mode=0: loaded.append(name))
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path / "my[env]*")])
    packaged(tmp_path / "my[env]*", b"")
    nvrtc._find_nvrtc()
    assert loaded == [str(tmp_path / "my[env]*/nvidia/cu13/lib/libnvrtc.so.13")]


def test_damaged_nvrtc_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc.sys, "path", [str(tmp_path)])
    packaged(tmp_path, b"not a library")
    message = r"libnvrtc\.so\.13, which cannot be loaded \(.*install it again, or use backend"
    with pytest.raises(RuntimeError, match=message):
        nvrtc.Nvrtc()


@pytest.mark.parametrize(
    "experts, hidden, inner, activation, reason",
    [
        (128, 2048, 768, SILU, None),
        (128, 4096, 384, Activation("silu", limit=7.0), None),
        (32, 2880, 2880, SILU, "hidden 2880 and intermediate 2880 are not both multiples of 128"),
        (128, 2688, 464, SILU, "not both multiples of 128"),
        (32, 2048, 768, Activation("swigluoai"), r"activation 'swigluoai' \(only 'silu'\)"),
        (1024, 2048, 768, SILU, r"1024 experts \(1 to 512\)"),
        (0, 2048, 768, SILU, r"0 experts \(1 to 512\)"),
        (-1, 2048, 768, SILU, "-1 experts"),
        (8, 32768, 1024, SILU, "do not fit in shared memory"),
    ],
)
def test_why_not_hopper(experts, hidden, inner, activation, reason):
    found = why_not_hopper(experts, hidden, inner, activation)
    assert found is None if reason is None else re.search(reason, found)


@pytest.mark.parametrize(
    "tokens, plan",
    [
        (1, DecodePlan("few", 8)),
        (4, DecodePlan("few", 8)),
        (16, DecodePlan("pair", 32)),
        (64, DecodePlan("fused", 32)),
        (256, DecodePlan("fused", 32)),
        (1024, None),
    ],
)
def test_forms_of_qwen3_30b_a3b(tokens, plan):
    assert decode_plan(tokens, 8, 128, 2048, 768, 132) == plan


def test_what_has_no_form_is_an_error():
    with pytest.raises(ValueError, match=r"0 experts \(1 to 512\)"):
        decode_plan(64, 8, 0, 2048, 768, 132)
    with pytest.raises(ValueError, match=r"form 'bogus' is not one of \['fused', 'pair', 'few'\]"):
        launches("bogus", 8, 2048, 768)


@pytest.mark.parametrize("tokens", [1, 2, 7, 33, 100, 500, 4096, 70000])
@pytest.mark.parametrize(
    "hidden, inner", [*SHAPES, (128, 128), (6400, 768), (6400, 6400), (8192, 8192)], ids=str
)
@pytest.mark.parametrize("experts, top_k", [(1, 1), (8, 2), (128, 8), (512, 10)])
def test_forms_fit_in_shared_memory(tokens, hidden, inner, experts, top_k):
    plan = decode_plan(tokens, top_k, experts, hidden, inner, 132)
    if plan is None:
        return
    assert tokens * top_k <= hopper.MAX_SLOTS
    assert plan.rows % 8 == 0 and 8 <= plan.rows <= hopper.MAX_ROWS
    free = FEW_SHARED if plan.form == "few" else SHARED
    for launch in launches(plan.form, plan.rows, hidden, inner):
        assert plan.rows <= launch.rows
        assert launch.shared <= free


def test_one_tile_for_batch_invariance(monkeypatch):
    monkeypatch.setenv(gemm.BATCH_INVARIANT_VARIABLE, "1")
    gemm.batch_invariant.cache_clear()
    try:
        assert len({moe_config(tokens, 8, 128) for tokens in (1, 64, 512, 8192)}) == 1
        assert len({gemm.linear_config(rows) for rows in (1, 20, 512)}) == 1
    finally:
        gemm.batch_invariant.cache_clear()
