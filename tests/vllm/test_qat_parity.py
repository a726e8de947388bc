"""The trainer's fingerprints after QAT steps are the engine's after a sync of the same weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quads_common.fingerprint import combine_ranks, differing
from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine

FINETUNE = Path(__file__).parents[2] / "examples/qat_finetune.py"
STEPS = ("step-000", "step-002", "step-004")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints of four QAT steps under either global scale rule."""
    folders = {}
    for rule in ("pow2", "te"):
        folders[rule] = tmp_path_factory.mktemp(rule)
        options = ["--out", folders[rule], "--steps", 4, "--save-every", 2, "--batch", 32]
        options += ["--lr", 1e-3, "--global-scale-rule", rule, "--device", "cpu"]
        subprocess.run([sys.executable, FINETUNE, *map(str, options)], check=True)
    return folders


@pytest.fixture(scope="module")
def served(trained, tmp_path_factory):
    """The engine's fingerprints after a sync of each checkpoint."""
    probes = []
    for rule, folder in trained.items():
        for step in STEPS:
            probes.append((f"{rule} {step} load", "reload", [str(folder / step)]))
            probes.append((f"{rule} {step}", "fingerprints", []))
    folder = tmp_path_factory.mktemp("engine")
    return run_engine(folder, trained["pow2"] / STEPS[0], probes, quantization="quads_nvfp4")


def trainers(folder, step):
    """What the trainer saved beside its checkpoint."""
    return json.loads((folder / step / "fingerprints.json").read_text())


@pytest.mark.parametrize("step", STEPS)
def test_fingerprints_agree_after_every_sync(trained, served, step):
    ours = combine_ranks(served[f"pow2 {step}"])
    assert len(ours) == 4 * 16 * 2
    assert not differing(trainers(trained["pow2"], step), ours)


def test_training_moves_the_codes(trained):
    first, last = (trainers(trained["pow2"], step) for step in (STEPS[0], STEPS[-1]))
    assert len(differing(first, last)) > 100


@pytest.mark.parametrize("step", STEPS)
def test_another_scale_rule_is_noticed(trained, served, step):
    """Negative control: the same weights, another rule, and every tensor differs."""
    ours = combine_ranks(served[f"te {step}"])
    assert differing(trainers(trained["te"], step), ours) == sorted(ours)
