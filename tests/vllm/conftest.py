"""The committed model, its variants, and one engine per configuration for the whole run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import ARITH_MOE, changed, small_dense

pytest.importorskip("vllm", reason="the vLLM environment has vllm")

ROOT = Path(__file__).parents[2]


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
def second_checkpoint(arith_moe, tmp_path_factory) -> Path:
    """Other weights for the same model."""
    return changed(arith_moe, tmp_path_factory.mktemp("second"), seed=1)


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Path:
    """A small random dense Qwen3 with the same tokenizer."""
    return small_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def second_dense(dense, tmp_path_factory) -> Path:
    """Other weights for it."""
    return changed(dense, tmp_path_factory.mktemp("second_dense"), seed=2)


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
            target = tmp_path_factory.mktemp("variant") / "checkpoint"
            script = ARITH_MOE / "make_outliers.py"
            command = [sys.executable, str(script), str(ARITH_MOE), str(target), *arguments]
            subprocess.run(command, check=True)
            made[arguments] = target
        return made[arguments]

    return make
