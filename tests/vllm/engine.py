"""Run an engine in a process of its own and get the results of its probes."""

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
ENGINE_DEFAULTS = {
    "dtype": "bfloat16",
    "enforce_eager": True,
    "gpu_memory_utilization": 0.2,  # of the CPU memory; the cache size is set by environment
    "max_model_len": 256,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 2048,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "worker_extension_cls": "tests.vllm.transfer.Registered",
}


def run_engine(
    folder: Path,
    model: Path,
    probes: list[tuple[str, str, list[Any]]],
    *,
    in_process: bool = True,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Start an engine on ``model``, run ``probes`` (name, method of ``Probes``, arguments).

    in_process: engine core in the same process, so that probes can look inside. Raises
    ``RuntimeError`` with the end of the log if it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, out, log = folder / "spec.json", folder / "out.pt", folder / "log.txt"
    engine = {**ENGINE_DEFAULTS, "model": str(model), **options}
    spec.write_text(json.dumps({"engine": engine, "probes": probes}))
    env = {
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        # Layers this small lose more at the barriers of two threads than they gain.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **(environment or {}),
    }
    with open(log, "w") as sink:
        code = subprocess.run(
            [sys.executable, "-m", "tests.vllm.probes", str(spec), str(out)],
            env=env,
            stdout=sink,
            stderr=subprocess.STDOUT,
            timeout=400,
        ).returncode
    if code:
        raise RuntimeError(f"engine failed with {code}:\n" + log.read_text()[-6000:])
    return torch.load(out, weights_only=False)


def free_port() -> int:
    """A loopback port that nobody listens on; SGLang uses the one 10000 above too."""
    for port in random.sample(range(20000, 55536), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port from 20000 to 55535")
