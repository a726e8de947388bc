"""The committed model, its variants, and one engine per configuration for the whole run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="the vLLM environment has vllm")

ROOT = Path(__file__).parents[2]
ARITH_MOE = ROOT / "examples/models/arith-moe"


@pytest.fixture(scope="session")
def arith_moe() -> Path:
    """The committed BF16 checkpoint."""
    return ARITH_MOE


@pytest.fixture(scope="session")
def checkpoint(arith_moe):
    """Its tensors by name."""
    from safetensors.torch import load_file

    return load_file(arith_moe / "model.safetensors")


@pytest.fixture(scope="session")
def problems():
    """The checkpoint's problem generator."""
    spec = importlib.util.spec_from_file_location("problems", ARITH_MOE / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def variant(tmp_path_factory):
    """Make a variant of the checkpoint with outlier channels; each is made once."""
    made = {}

    def make(*arguments: str) -> Path:
        if arguments not in made:
            target = tmp_path_factory.mktemp("variant")
            script = ARITH_MOE / "make_outliers.py"
            command = [sys.executable, str(script), str(ARITH_MOE), str(target), *arguments]
            subprocess.run(command, check=True)
            made[arguments] = target
        return made[arguments]

    return make
