"""The choice of a backend, and what the operators do with its name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quads_common import backend as backends
from quads_common.activation import Activation
from quads_common.backend import choose_backend, general_backend, moe_backend
from quads_common.ops import quads_linear

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "requested, device, capability, chosen",
    [
        ("auto", "cpu", None, "emulated"),
        ("emulated", "cpu", None, "emulated"),
        ("emulated", "cuda", (7, 5), "emulated"),
        ("auto", "cuda", (8, 0), "triton"),
        ("auto", "cuda", (9, 0), "hopper"),
        ("hopper", "cuda", (9, 0), "hopper"),
        ("triton", "cuda", (9, 0), "triton"),
        ("triton", "cuda", (12, 0), "triton"),
        ("auto", "cuda", (12, 1), "triton"),
        ("auto", "cuda", (10, 0), "blackwell"),
        ("auto", "cuda", (10, 3), "blackwell"),
        ("blackwell", "cuda", (12, 0), "blackwell"),
    ],
)
def test_choose_backend(requested, device, capability, chosen):
    pytest.importorskip("triton")
    assert choose_backend(requested, device, capability) == chosen


@pytest.mark.parametrize(
    "requested, device, capability, message",
    [
        (
            "cutlass",
            "cpu",
            None,
            r"backend 'cutlass' is not allowed: one of \['auto', 'emulated', ",
        ),
        ("auto", "xpu", None, "no backend for device 'xpu'"),
        ("triton", "cpu", None, "needs a CUDA GPU .* sm_80 or newer, the device is 'cpu'"),
        ("auto", "cuda", (7, 5), "needs a CUDA GPU .* sm_80 or newer, this one is sm_75"),
        ("triton", "cuda", (7, 0), "this one is sm_70"),
        ("auto", "cuda", None, "this GPU's is not known"),
        ("blackwell", "cuda", (9, 0), r"needs a GPU of \['sm_100', .*\], this one is sm_90"),
        ("blackwell", "cpu", None, "needs a GPU of .*, this one is cpu"),
        ("hopper", "cuda", (10, 0), "'hopper' needs a GPU .* sm_90, this one is sm_100"),
        ("hopper", "cpu", None, "backend 'hopper' needs a CUDA GPU"),
    ],
)
def test_choose_backend_refuses(requested, device, capability, message):
    with pytest.raises(ValueError, match=message):
        choose_backend(requested, device, capability)


def test_layers_of_hopper_without_a_path_of_their_own():
    assert general_backend("hopper") == "triton"
    assert general_backend("emulated") == "emulated"
    assert moe_backend("triton", 128, 2048, 768, Activation(), "nvfp4") == ("triton", None)
    pytest.importorskip("triton")
    name, reason = moe_backend("hopper", 32, 2880, 2880, Activation(), "nvfp4")
    assert name == "triton"
    assert "2880" in reason


def test_layers_with_bf16_columns(monkeypatch):
    """On ``hopper`` where the counts fit; its kernels are compiled for them."""
    pytest.importorskip("triton")
    from quads_common.kernels import hopper

    prepared = []
    monkeypatch.setattr(hopper, "prepare", lambda *arguments: prepared.append(arguments))
    layer = (128, 2048, 768, Activation(), "nvfp4", False, True)
    assert moe_backend("hopper", *layer, (64, 32)) == ("hopper", None)
    assert prepared == [(2048, 768, "nvfp4", False, True, (64, 32))]
    name, reason = moe_backend("hopper", *layer, (64, 200))
    assert name == "triton"
    assert "200 BF16 columns of w2" in reason
    assert len(prepared) == 1


def test_missing_triton_is_an_error(monkeypatch):
    """Never the slow backend instead."""
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="needs Triton, which is not installed"):
        choose_backend("auto", "cuda", (9, 0))


@pytest.mark.parametrize("version", ["3.5.1", "2.10.0"])
def test_old_triton_is_no_blackwell(monkeypatch, version):
    """It would abort the process while it compiles."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton, "__version__", version)
    with pytest.raises(RuntimeError, match=rf"needs Triton 3.6 or newer, found {version}; backend"):
        choose_backend("auto", "cuda", (10, 0))
    assert choose_backend("triton", "cuda", (10, 0)) == "triton"


def test_operators_refuse_unknown_backends():
    x = torch.zeros(2, 16)
    packed = torch.zeros((4, 8), dtype=torch.uint8)
    scale = torch.zeros((4, 1), dtype=torch.uint8).view(torch.float8_e4m3fn)
    for name in ("auto", "cutlass"):
        with pytest.raises(ValueError, match=f"backend '{name}' has no layers"):
            quads_linear(x, packed, scale, torch.ones(1), None, "nvfp4", name)


def test_emulated_operators_load_no_triton():
    code = (
        "import sys, torch\n"
        "from quads_common.ops import quads_linear\n"
        "scale = torch.zeros((4, 1), dtype=torch.uint8).view(torch.float8_e4m3fn)\n"
        "packed = torch.zeros((4, 8), dtype=torch.uint8)\n"
        "with torch.no_grad():\n"
        "    y = quads_linear(torch.ones(2, 16), packed, scale, torch.ones(1), None, 'nvfp4',\n"
        "                     'emulated')\n"
        "assert y.shape == (2, 4)\n"
        "loaded = [n for n in sys.modules if n.startswith('quads_common.kernels')]\n"
        "assert not loaded, loaded\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "common")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
