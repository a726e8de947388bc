"""What tests of compensation share: options, prompts, the model with planted hot channels."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.checkpoints import ARITH_MOE

SPLICE_COUNTS = {f"splice_count_{kind}": 16 for kind in ("w13", "w2", "linear")}
VLLM_FILES = Path(__file__).parent / "vllm_files"
PROMPTS, FED = 60, 40  # sequences for log-probs, and those that are counted
CAPTURED, ALONE = 12, 12  # those of the batches that are looked into, and that are sent one by one


def options_of(preset: str, **more: object) -> dict:
    """Options of the method for a preset: everything is counted, lists choose early, and as many
    channels as were planted are spliced. ``quads_splice`` is for linears too."""
    if preset == "nvfp4":
        return {"method": preset, **more}
    counts = {} if preset == "quads" else SPLICE_COUNTS
    targets = "all" if preset == "quads_splice" else "auto"
    common = {"method": preset, "targets": targets, "sampling_rate": 1, "min_tokens": 8}
    return {**common, **counts, **more}


def override(options: dict) -> str:
    """``--json-model-override-args``."""
    return json.dumps({"quantization_config": options})


def heldout(count: int = 400) -> list[list[int]]:
    """Token ids of held-out problems with their answers."""
    from transformers import AutoTokenizer

    spec = importlib.util.spec_from_file_location("problems", ARITH_MOE / "problems.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tokenizer = AutoTokenizer.from_pretrained(ARITH_MOE)
    texts = [prompt + answer for prompt, answer in module.heldout(count, seed=5)]
    return [tokenizer(text)["input_ids"] for text in texts]


def vllm_logprobs(preset: str) -> list[torch.Tensor]:
    """What vLLM gave for the first ``PROMPTS`` of ``heldout``."""
    found = load_file(VLLM_FILES / f"{preset}-logprobs.safetensors")
    return [found[str(i)] for i in range(PROMPTS)]


def hot_checkpoint(target: Path) -> Path:
    """arith-moe with its hot channels 32 times as large."""
    if not target.exists():
        script = ARITH_MOE / "make_outliers.py"
        command = [sys.executable, str(script), str(ARITH_MOE), str(target), "--scale", "32"]
        subprocess.run(command, check=True)
    return target


def hot_channels(model: Path) -> list[list[int]]:
    """The planted channels of each layer."""
    return json.loads((model / "config.json").read_text())["arith_moe"]["hot_channels"]
