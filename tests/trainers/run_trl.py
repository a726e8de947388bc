"""TRL's GRPOTrainer as released, colocate mode, on a CPU: the trainer of examples/grpo_trl.py.

``python tests/trainers/run_trl.py OUT.json [STEPS]`` writes the log and the fingerprints of both
sides after every weight sync. Then it does two things wrong, which must show.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
EXPERTS, EXPERT = "model.layers.1.mlp.experts.down_proj", 5


def main() -> None:
    """Run, and write what was seen."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    sys.argv = [sys.argv[0], "--steps", str(steps), "--lr", "1e-4"]
    import grpo_trl

    from quads_common.qat import fingerprints
    from quads_common.qat.weight import prepared_weights
    from quads_trainers.sync_check import WeightsDifferError, engine_fingerprints

    with tempfile.TemporaryDirectory() as folder:
        trainer = grpo_trl.build_trainer(grpo_trl.parse_args(), folder)
        generation = trainer.vllm_generation
        checked_sync, syncs = generation.sync_weights, []

        def recording_sync() -> None:
            checked_sync()
            both = {"trainer": fingerprints(trainer.model)}
            syncs.append(both | {"engine": engine_fingerprints(generation.llm)})

        generation.sync_weights = recording_sync
        trainer.train()

    def error_of_sync() -> str:
        try:
            checked_sync()
        except WeightsDifferError as error:
            return str(error)
        return ""

    config = generation.llm.llm_engine.vllm_config
    seen: dict[str, Any] = {
        "quantization": config.model_config.quantization,
        "syncs": syncs,
        "log": trainer.state.log_history,
        "checked": trainer.synced_tensors,
    }
    # Control: one expert keeps its old weights in what is sent.
    parameters = generation._iter_named_params
    old = dict(trainer.model.named_parameters())[EXPERTS].detach().clone()
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.mul_(1.1)

    def stale() -> Any:
        for name, p in parameters():
            if name == EXPERTS:
                p = p.detach().clone()
                p[EXPERT] = old[EXPERT]
            yield name, p

    generation._iter_named_params = stale
    seen["skipped"] = error_of_sync()
    generation._iter_named_params = parameters
    seen["repaired"] = error_of_sync()
    # Control: a trainer that scales in another way.
    for weight in prepared_weights(trainer.model):
        weight.rule = "te"
    seen["other_rule"] = error_of_sync()
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
