"""All kernels on this GPU at the sizes of real models: what ``check_kernels.py`` compares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "check_kernels.py"
ROOT = SCRIPT.parents[2]


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_kernels():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "common"), str(ROOT)])}
    command = [sys.executable, str(SCRIPT), "--jobs", "8"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
