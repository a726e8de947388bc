"""Engines and updates for ``check_sglang.py`` and ``benchmarks/bench_sglang.py``."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[1] / "examples/models/arith-moe"
PROMPTS = [f"{a}{op}{b}=" for a, op, b in ((347, "+", 589), (12, "-", 345), (808, "+", 77))] + [
    f"{100 + 7 * i}+{20 + i}=" for i in range(5)
]
PORT_VARIABLE = "QUADS_CHECK_PORT"
# What the kernels of SGLang's optional packages (FlashAttention 3, FlashInfer, xgrammar) would do.
OPTIONS = {
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_radix_cache": True,
    "skip_server_warmup": True,
    "random_seed": 0,
    "custom_weight_loader": ["sglang_inside.run"],
}


def engine(model: Path, **options: Any) -> Any:
    """A ``sglang.Engine``."""
    import sglang

    # Engines that start at once must not search for ports in the same range.
    options.setdefault("port", int(os.environ.get(PORT_VARIABLE, 30000)))
    return sglang.Engine(model_path=str(model), **{**OPTIONS, **options})


def inside(llm: Any, function: str) -> Any:
    """Call a function of ``sglang_inside`` in the scheduler."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        named = [(json.dumps({"function": function, "out": str(out)}), torch.zeros(1).cuda())]
        answer = llm.update_weights_from_tensor(
            named, load_format=OPTIONS["custom_weight_loader"][0], flush_cache=False
        )
        check(answer)
        return json.loads(out.read_text())


def check(answer: Any) -> None:
    """Raise what an update reports."""
    if not answer[0]:
        raise RuntimeError(answer[1])


def outputs(llm: Any) -> list[Any]:
    """Tokens and log-probs of eight prompts, one at a time: the same batches in every engine."""
    found = []
    for prompt in PROMPTS:
        answer = llm.generate(
            prompt,
            {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
            return_logprob=True,
        )
        chosen = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
        found.append([answer["output_ids"], chosen])
    return found


def together(llm: Any, prompts: list[str], tokens: int) -> int:
    """Run prompts as one batch; how many tokens went through the model."""
    flush(llm)
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    answers = [a["meta_info"] for a in llm.generate(prompts, params)]
    flush(llm)
    return sum(a["prompt_tokens"] + a["completion_tokens"] - 1 for a in answers)


def flush(llm: Any) -> None:
    """A finished request may not be drained yet; an update or a release would then kill SGLang."""
    import time

    for _ in range(200):
        answer = llm.flush_cache()
        if getattr(answer, "success", answer):
            return
        time.sleep(0.02)
    raise RuntimeError("the cache could not be flushed")


def second_weights() -> dict[str, torch.Tensor]:
    """Other weights for arith-moe."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(1)
    changed = {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        noise = 1 + 0.02 * torch.randn(tensor.shape, generator=generator)
        scale = 2.5 if name.endswith("up_proj.weight") else 1.0
        changed[name] = (tensor.float() * noise * scale).to(torch.bfloat16)
    return changed


def second_checkpoint() -> Path:
    """The same as a folder."""
    import shutil

    from safetensors.torch import save_file

    target = Path(tempfile.gettempdir()) / "arith-moe-second-sglang"
    if not (target / "model.safetensors").exists():
        shutil.copytree(MODEL, target, dirs_exist_ok=True)
        save_file(second_weights(), target / "model.safetensors", metadata={"format": "pt"})
    return target


def expected_prints(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """The torch quantizer's digests of arith-moe's experts."""
    from quads_common import fingerprint, quantize

    found = {}
    for name in weights:
        if name.endswith("gate_proj.weight"):
            expert = name.removesuffix(".gate_proj.weight")
            pair = [weights[f"{expert}.{n}_proj.weight"] for n in ("gate", "up")]
            found[f"{expert}.w13"] = fingerprint(quantize(torch.cat(pair)))
            found[f"{expert}.w2"] = fingerprint(quantize(weights[f"{expert}.down_proj.weight"]))
    return found


def update(llm: Any, weights: dict[str, torch.Tensor], path: str, folder: Path) -> None:
    """One weight update: "tensor" in buckets on the GPU, "flattened", "disk" from ``folder``."""
    flush(llm)
    items = [(name, tensor.cuda()) for name, tensor in weights.items()]
    if path == "disk":
        check(llm.update_weights_from_disk(str(folder)))
    elif path == "tensor":
        for start in range(0, len(items), 64):
            check(llm.update_weights_from_tensor(items[start : start + 64], flush_cache=False))
    else:
        send_flattened(llm, items[::-1])
    flush(llm)


def send_flattened(llm: Any, items: list[tuple[str, torch.Tensor]]) -> None:
    """Flattened buckets, as verl and slime send them."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    for start in range(0, len(items), 64):
        bucket = FlattenedTensorBucket(named_tensors=items[start : start + 64])
        payload = MultiprocessingSerializer.serialize(
            {
                "flattened_tensor": bucket.get_flattened_tensor(),
                "metadata": bucket.get_metadata(),
            }
        )
        check(
            llm.update_weights_from_tensor(
                [payload], load_format="flattened_bucket", flush_cache=False
            )
        )
