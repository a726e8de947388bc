"""Runs ``interpreted/`` in a process that has Triton's interpreter switched on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


@pytest.mark.timeout(300)
def test_layers_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(FOLDER)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 12
