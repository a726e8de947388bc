"""What ``QuadsGRPOTrainer`` does among two trainer processes, with gloo and FSDP2; no engine.

``torchrun --nproc-per-node 2 tests/trainers/run_trl_two_ranks.py FOLDER`` writes RANK.json there.
"""

import json
import sys
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from quads_common.qat import fingerprints, prepare_qat
from quads_trainers import sync_check
from quads_trainers.trl import QuadsGRPOTrainer

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "arith-moe"


def output_of(rank):
    """Rank 0 has gaps of 0.1 on four tokens, rank 1 of 0.3 on two, padded to another length."""
    length = 4 - rank
    rollout = torch.full((2, length), -1.0)
    mask = torch.ones(2, length, dtype=torch.long)
    mask[:, 2:] = 1 - rank
    gap = 0.3 if rank else 0.1
    return {
        "sampling_per_token_logps": rollout,
        "old_per_token_logps": rollout + gap,
        "completion_mask": mask,
    }


def main() -> None:
    """Run, and write what was seen."""
    # A process that waits for the other for good fails the run.
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=60))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[patience])
    rank = accelerator.process_index
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    prepare_qat(model, {})
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trainer = object.__new__(QuadsGRPOTrainer)
    client = SimpleNamespace(base_url="the server")  # TRL makes one in the main process only
    generation = SimpleNamespace(mode="server", sync_weights=lambda: None)
    if rank == 0:
        generation.vllm_client = client
    trainer.__dict__.update(
        accelerator=accelerator,
        model=model,
        vllm_generation=generation,
        synced_tensors=[],
        _metrics={"train": defaultdict(list)},
    )
    served = fingerprints(model)
    sync_check.engine_fingerprints = lambda engine: dict(served)
    trainer._check_every_sync()
    generation.sync_weights()
    seen = {"checked": trainer.synced_tensors, "errors": []}
    name = next(iter(served))
    served[name] = "another"
    for _ in range(2):
        try:
            generation.sync_weights()
        except Exception as error:
            seen["errors"].append([type(error).__name__, str(error)])
        sync_check.engine_fingerprints = lambda engine: {}["no answer"]
    trainer._log_gap(output_of(rank))
    seen["gap"] = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
