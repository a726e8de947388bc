"""The committed model, a second one like it, and a dense one."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the SGLang environment has sglang (make setup-sglang)")


@pytest.fixture(scope="session")
def arith_moe() -> Path:
    """The committed BF16 checkpoint."""
    from tests.checkpoints import ARITH_MOE

    return ARITH_MOE


@pytest.fixture(scope="session")
def second_checkpoint(arith_moe, tmp_path_factory) -> Path:
    """Other weights for the same model."""
    from tests.checkpoints import changed

    return changed(arith_moe, tmp_path_factory.mktemp("second"), seed=1)


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> Path:
    """A small random dense Qwen3 with the same tokenizer."""
    from tests.checkpoints import small_dense

    return small_dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def second_dense(dense, tmp_path_factory) -> Path:
    """Other weights for it."""
    from tests.checkpoints import changed

    return changed(dense, tmp_path_factory.mktemp("second_dense"), seed=2)


@pytest.fixture(scope="session")
def problems(arith_moe):
    """The checkpoint's problem generator."""
    spec = importlib.util.spec_from_file_location("problems", arith_moe / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def hot(tmp_path_factory) -> Path:
    """arith-moe with its hot channels 32 times as large."""
    from tests.sglang.compensated import hot_checkpoint

    return hot_checkpoint(tmp_path_factory.mktemp("hot") / "checkpoint")


@pytest.fixture(scope="session")
def compensated(hot, tmp_path_factory):
    """Run probes in an engine with the given options of the method."""
    from tests.sglang.compensated import override
    from tests.sglang.engine import run_engine

    def run(options, probes, model=hot, **engine_options):
        return run_engine(
            tmp_path_factory.mktemp("engine"),
            model,
            probes,
            quantization="quads_nvfp4",
            json_model_override_args=override(options),
            **engine_options,
        )

    return run
