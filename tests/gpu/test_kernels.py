"""All kernels on this GPU at the sizes of real models: what the scripts beside this compare."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]


def run(script: str, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "common"), str(ROOT)])}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_kernels():
    run("check_kernels.py", "--jobs", "8")


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_kernels_that_compensate():
    run("check_compensation_kernels.py", "--jobs", "8", "--only", "comparisons")


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_hopper_kernels():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs an sm_90 GPU")
    run("check_hopper.py")
