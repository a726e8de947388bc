"""Layers that stay BF16, patterns that match nothing, and what the log says of it all."""

import pytest

from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine

KEPT = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the engine's log lies."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def engine(arith_moe, second_checkpoint, folder):
    """Experts of layer 0 kept, and an ignore pattern with a typo."""
    probes = [
        ("report", "report", []),
        ("answer", "answers", [["347+589="]]),
        ("reload", "error_of_reload", [str(second_checkpoint)]),
    ]
    options = {"quads": {"ignore": [KEPT, "layers.O.mlp"]}}
    return run_engine(
        folder, arith_moe, probes, quantization="quads_nvfp4", additional_config=options
    )


def test_kept_experts_are_served(engine):
    (report,) = engine["report"]
    assert (report["layers_quantized"], report["layers_kept"]) == (3, 13)
    assert engine["answer"] == ["936"]


def test_kept_experts_refuse_new_weights_on_a_cpu(engine):
    assert engine["reload"].startswith(f"NotImplementedError: {KEPT} stays BF16"), engine["reload"]


def test_the_log_tells(engine, folder):
    log = (folder / "log.txt").read_text()
    assert "INFO" in log
    assert "quads_nvfp4: method quads, act nvfp4, targets auto, backend emulated" in log
    assert "quads_nvfp4: 3 layers quantized, 13 kept" in log
    assert "quads_nvfp4: ignore: 'layers.O.mlp' matches no layer of this model" in log


def test_targets_that_match_nothing_stop_the_engine(arith_moe, tmp_path):
    options = {"quads": {"targets": ["experts", "linaer"]}}
    with pytest.raises(RuntimeError, match="targets: 'linaer' matches no layer of this model"):
        run_engine(tmp_path, arith_moe, [], quantization="quads_nvfp4", additional_config=options)
