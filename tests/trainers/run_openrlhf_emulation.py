"""An emulation of OpenRLHF's weight sync (its own needs CUDA): ``run_openrlhf_emulation.py OUT``.

What is taken from OpenRLHF 0.11.2: the engine's arguments (``create_vllm_engines``), the method
switched on by the environment, BF16 parameters, and the loop of ``broadcast_to_vllm`` and
``WorkerWrap.update_weight``: ``load_weights([(name, weight)])`` for each parameter, nothing after.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_QUADS_CONFIG"] = json.dumps({"enable": True, "method": "nvfp4"})

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM

from quads_common.qat import fingerprints, prepare_qat
from quads_trainers.sync_check import engine_fingerprints

MODEL = Path(__file__).resolve().parents[2] / "examples/models/arith-moe"
STALE = "model.layers.1.mlp.experts.down_proj"


def main() -> None:
    """Three syncs, then one in which a tensor is missing."""
    llm = LLM(
        str(MODEL),
        enforce_eager=True,
        seed=1,
        max_model_len=256,
        enable_prefix_caching=False,
        dtype="bfloat16",
        gpu_memory_utilization=0.2,
    )
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16)
    prepare_qat(model, {"method": "nvfp4"})
    config = llm.llm_engine.vllm_config.model_config
    seen: dict[str, Any] = {"quantization": config.quantization, "steps": []}
    engine = llm.llm_engine.model_executor.driver_worker.model_runner.model

    def sync(without: str = "") -> dict[str, Any]:
        for name, parameter in model.named_parameters():
            if name != without:
                weight = parameter.data.clone()
                engine.load_weights(weights=[(name, weight)])
                weight.fill_(float("nan"))  # OpenRLHF frees it at once
        return {"trainer": fingerprints(model), "engine": engine_fingerprints(llm)}

    def change() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.02)

    for _ in range(3):
        change()
        seen["steps"].append(sync())
    change()
    seen["skipped"] = sync(without=STALE)
    Path(sys.argv[1]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
