"""Compare a QAT run's fingerprints with a vLLM engine's after a sync of every saved step.

    python examples/qat_finetune.py --out DIR
    python benchmarks/qat_parity.py DIR

Prints one line per step and exits with 1 if any tensor differs.
"""

import json
import sys
import tempfile
from pathlib import Path

from quads_common.fingerprint import combine_ranks, differing
from tests.vllm.engine import run_engine


def main() -> int:
    """One engine, one reload per step."""
    steps = sorted(Path(sys.argv[1]).glob("step-*"))
    if not steps:
        sys.exit(f"{sys.argv[1]} holds no step-* folders; make them with examples/qat_finetune.py")
    probes = []
    for step in steps:
        probes.append((f"{step.name} loaded", "reload", [str(step)]))
        probes.append((step.name, "fingerprints", []))
    with tempfile.TemporaryDirectory() as folder:
        results = run_engine(Path(folder), steps[0], probes, quantization="quads_nvfp4")
    different, previous = 0, None
    for step in steps:
        trainer = json.loads((step / "fingerprints.json").read_text())
        wrong = differing(trainer, combine_ranks(results[step.name]))
        moved = len(differing(previous, trainer)) if previous else 0
        print(f"{step.name}: {len(wrong)} of {len(trainer)} differ; {moved} changed since the last")
        different += len(wrong)
        previous = trainer
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
