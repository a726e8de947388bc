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
FED = slice(60, 100)  # of ``heldout``: those that are counted
SCORED = slice(100, 400)  # those whose log-probs are compared
GROUP = 9  # of them at once: 117 tokens at most, which no engine here cuts into chunks
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
    """What vLLM gave for the ``SCORED`` sequences of ``heldout``."""
    found = load_file(VLLM_FILES / f"{preset}-logprobs.safetensors")["logprobs"]
    return list(found.split([len(ids) - 1 for ids in heldout()[SCORED]]))


def first_seen(sequences: list[list[int]]) -> torch.Tensor:
    """Which log-probs of the sequences, one after the other, no earlier sequence begins with.

    bool [all tokens but each sequence's first]. Problems share their first digits, and what comes
    after equal beginnings is one measurement: counted each time, one of them was most of what lay
    beyond the 99th percentile.
    """
    seen: set[tuple[int, ...]] = set()
    new = []
    for ids in sequences:
        beginnings = [tuple(ids[:end]) for end in range(2, len(ids) + 1)]
        new += [beginning not in seen for beginning in beginnings]
        seen.update(beginnings)
    return torch.tensor(new)


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
