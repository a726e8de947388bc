"""Run one of the scripts beside this file in a process of its own, and read what it wrote."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm.engine import free_port

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 500


def run_python(folder: Path, *arguments: object, **environment: str) -> str:
    """Run Python with ``arguments``; return stdout. Raises with the end of the log if it fails."""
    log = folder / "log.txt"
    paths = [str(ROOT / "common"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "MASTER_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(paths),
        **environment,
    }
    with open(log, "w") as sink:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            timeout=TIMEOUT_S,
        )
    if done.returncode:
        raise RuntimeError(f"failed with {done.returncode}:\n{log.read_text()[-6000:]}")
    return done.stdout


def run_script(name: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """Run ``name`` of this folder; return the JSON that it wrote."""
    out = folder / "out.json"
    run_python(folder, FOLDER / name, out, *arguments)
    return json.loads(out.read_text())
