"""Run an SGLang engine in a process of its own and get the results of its probes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
INSIDE = "tests.sglang.inside.run"
# What a CPU needs (SGLang's own defaults are for a GPU), and a small cache.
CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 4096,
    "max_running_requests": 128,
    "skip_server_warmup": True,
    "log_level": "info",
    "random_seed": 0,
    "custom_weight_loader": [INSIDE],
}
CPU_ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "OMP_NUM_THREADS": "1",  # layers this small lose more at barriers than they gain
    "HF_HUB_OFFLINE": "1",
}


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs an engine on this checkout."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "common"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **CPU_ENVIRONMENT, "PYTHONPATH": path, **more}


def run_engine(
    folder: Path,
    model: Path,
    probes: list[tuple[str, str, list[Any]]],
    *,
    variables: dict[str, str] | None = None,
    how: str = "engine",
    **options: Any,
) -> dict[str, Any]:
    """Start an engine on ``model``, run ``probes`` (name, method of ``Probes``, arguments).

    how: "engine" gives options to ``sglang.Engine``; "server args" builds ``ServerArgs`` before
    any plugin is loaded, as some trainers do. Raises ``RuntimeError`` with the end of the log if
    it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, out, log = folder / "spec.json", folder / "out.pt", folder / "log.txt"
    engine = {**CPU_OPTIONS, "model_path": str(model), **options}
    spec.write_text(
        json.dumps({"engine": engine, "how": how, "probes": probes, "folder": str(folder)})
    )
    with open(log, "w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.sglang.probes", str(spec), str(out)],
            env=environment(**(variables or {})),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=540)
        finally:
            stop_group(process)
    if code or not out.exists():
        raise RuntimeError(f"engine failed with {code}:\n" + log.read_text()[-6000:])
    return {**torch.load(out, weights_only=False), "log": log.read_text()}


def stop_group(process: subprocess.Popen) -> None:
    """Kill what is left of a process and of those it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
