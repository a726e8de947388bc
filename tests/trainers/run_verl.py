"""verl's FSDP engine, weight sender, receiver and vLLM worker extension, as released, on a CPU.

``python tests/trainers/run_verl.py OUT.json [STEPS]`` trains arith-moe with verl's own engine in
``qat.mode=quads_nvfp4``, sends the weights after every step in verl's way (FP32, split by
``unfuse_moe_params``, in buckets of 1 MB over shared memory), and writes the fingerprints of both
sides. Then it does two things wrong, which must show.
"""

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.update(VERL_REPLICA_RANK="0", VERL_RAY_JOB_ID=f"quads-{os.getpid()}")

import torch
from verl_cpu_platform import use_cpu

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/arith-moe"
sys.path.insert(0, str(ROOT / "examples"))
sys.path.insert(0, str(MODEL))

EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
STALE = "model.layers.1.mlp.experts.5.down_proj.weight"
HALF = "model.layers.2.mlp.experts.3.up_proj.weight"
BUCKET_MB = 1
TIMEOUT_S = 60

Stream = Iterator[tuple[str, torch.Tensor]]


def build_trainer() -> Any:
    """verl's FSDP2 engine with QAT in our mode; FP32 masters, BF16 forward, its defaults."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.config.engine import QATEngineConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    engine = FSDPEngineWithLMHead(
        HFModelConfig(
            path=str(MODEL),
            use_remove_padding=False,
            override_config={"attn_implementation": "eager"},
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            use_torch_compile=False,
            qat=QATEngineConfig(enable=True, mode="quads_nvfp4"),
        ),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=100),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def build_rollout() -> Any:
    """vLLM as verl starts it: random weights, verl's worker extension."""
    from vllm import LLM

    return LLM(
        str(MODEL),
        quantization="quads_nvfp4",
        hf_overrides={"quantization_config": {"method": "nvfp4"}},
        load_format="dummy",
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        max_model_len=256,
        worker_extension_cls=EXTENSION,
    )


def sync(engine: Any, llm: Any, change: Callable[[Stream], Stream] = iter) -> None:
    """One weight sync by verl's sender and receiver; ``change`` tampers with the stream."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    (handle,) = llm.collective_rpc("_get_zmq_handle")
    sender = BucketedWeightSender(handle, bucket_size_mb=BUCKET_MB, use_shm=True)
    stream, _ = engine.get_per_tensor_param()
    errors: list[BaseException] = []

    def send() -> None:
        try:
            asyncio.run(sender.async_send_weights(change(stream)))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    thread.join(TIMEOUT_S)
    if errors or thread.is_alive():
        raise RuntimeError(f"the sender failed or hangs: {errors}")
    llm.reset_prefix_cache()


def train_step(engine: Any, seed: int) -> tuple[float, float]:
    """One step on arithmetic problems by verl's optimizer step; loss and norm of the gradient."""
    from arith_model import PAD_ID
    from arithmetic import draw_problems
    from batches import encode

    inputs, labels = (part.long() for part in encode(draw_problems(32, seed)))
    logits = engine.module(input_ids=inputs, use_cache=False).logits.float()
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=PAD_ID
    )
    engine.optimizer_zero_grad()
    loss.backward()
    return float(loss), float(engine.optimizer_step())


def main() -> None:
    """Run, and write what was seen."""
    out, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 20
    use_cpu(port=int(os.environ.get("MASTER_PORT", "29613")))
    from quads_common.qat import fingerprints
    from quads_common.qat.weight import prepared_weights
    from quads_trainers.sync_check import engine_fingerprints

    engine, llm = build_trainer(), build_rollout()
    seen: dict[str, Any] = {"steps": [], "plugin": "quads_trainers.verl" in sys.modules}

    def record(name: str, **facts: Any) -> None:
        facts |= {"trainer": fingerprints(engine.module), "engine": engine_fingerprints(llm)}
        (seen["steps"].append if name == "step" else lambda x: seen.update({name: x}))(facts)

    record("before")
    for step in range(steps):
        sync(engine, llm)
        record("step")
        loss, norm = train_step(engine, seed=step)
        seen["steps"][-1] |= {"loss": loss, "gradient_norm": norm}

    # Control: an expert that is not sent.
    sync(engine, llm, lambda stream: (item for item in stream if item[0] != STALE))
    record("skipped")
    # Control: half of a unit; what came is dropped, the unit keeps its old weights.
    train_step(engine, seed=steps)
    sync(engine, llm, lambda stream: (item for item in stream if item[0] != HALF))
    record("half")
    # And all is well again.
    sync(engine, llm)
    record("repaired")
    # Control: a trainer that scales in another way.
    for weight in prepared_weights(engine.module):
        weight.rule = "te"
    record("other_rule")
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
