"""The examples as a user runs them, as far as a CPU goes."""

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from tests.trainers.running import ROOT, run_python

EXAMPLES = ROOT / "examples"


@pytest.mark.engine
def test_grpo_plain(tmp_path):
    output = run_python(tmp_path, EXAMPLES / "grpo_plain.py", "--steps", 3, "--prompts", 4)
    steps = re.findall(r"^step +(\d+) .* (\d+) tensors equal", output, re.MULTILINE)
    assert steps == [("0", "128"), ("1", "128"), ("2", "128")]
    for phase in ("sync", "check", "generate", "log-probs", "update"):
        assert re.search(rf"^{phase} +3 +[\d.]+ +[\d.]+ +[\d.]+%$", output, re.MULTILINE)


def test_the_loop_of_grpo_plain_is_short():
    """It is there to be read: the part below the settings has about sixty lines."""
    text = (EXAMPLES / "grpo_plain.py").read_text()
    loop = text[text.index("for step in range") :].strip().splitlines()
    assert len(loop) <= 60


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("grpo_*.sh")), ids=lambda p: p.name)
def test_scripts_are_shell(script):
    subprocess.run(["bash", "-n", script], check=True)


def test_grpo_openrlhf_uses_flags_that_openrlhf_has():
    specification = importlib.util.find_spec("openrlhf")
    if specification is None:
        pytest.skip("needs OpenRLHF: make test-trainers")
    (folder,) = specification.submodule_search_locations
    source = (Path(folder) / "cli/train_ppo_ray.py").read_text()
    flags = re.findall(r"--[a-z]+\.[a-z_.]+", (EXAMPLES / "grpo_openrlhf.sh").read_text())
    assert len(flags) > 15
    assert not [flag for flag in flags if f'"{flag}"' not in source]
