"""Engines, weights and sync paths for ``check_sync.py``."""

import gc
import json
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples/models/arith-moe"
PROMPTS = [f"{a}{op}{b}=" for a, op, b in ((347, "+", 589), (12, "-", 345), (808, "+", 77))] + [
    f"{100 + 7 * i}+{20 + i}=" for i in range(5)
]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8]}
LAYERS, EXPERTS, HIDDEN, INNER = 8, 128, 2048, 768


def engine(model: Path, **options: Any) -> Any:
    """An in-process engine."""
    from vllm import LLM

    defaults = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 8, "seed": 0}
    # A fixed cache: engines beside each other on one GPU would see each other's memory.
    defaults |= {"gpu_memory_utilization": 0.2, "enable_prefix_caching": False}
    defaults["kv_cache_memory_bytes"] = 1 << 30
    return LLM(str(model), **{**defaults, **options})


def worker_of(llm: Any) -> Any:
    """The engine's only worker."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def outputs(llm: Any) -> list[Any]:
    """Tokens and their log-probs for eight prompts at once: the captured batch size."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0, ignore_eos=True)
    found = []
    for o in llm.generate(PROMPTS, params, use_tqdm=False):
        completion = o.outputs[0]
        chosen = [
            step[t].logprob
            for step, t in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        found.append([list(completion.token_ids), chosen])
    return found


def prints(llm: Any) -> dict[str, str]:
    """Digests of the engine's weights."""
    from quads_common.fingerprint import combine_ranks

    return combine_ranks(llm.collective_rpc("quads_fingerprints"))


def second_weights() -> dict[str, torch.Tensor]:
    """Other weights for arith-moe, on the GPU."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(1)
    changed = {}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        noise = 1 + 0.02 * torch.randn(tensor.shape, generator=generator)
        scale = 2.5 if name.endswith("up_proj.weight") else 1.0
        changed[name] = (tensor.float() * noise * scale).to(torch.bfloat16).cuda()
    return changed


def expected_prints(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """The torch quantizer's digests of arith-moe's experts."""
    from quads_common import fingerprint, quantize

    found = {}
    for name in weights:
        if name.endswith("gate_proj.weight"):
            expert = name.removesuffix(".gate_proj.weight")
            pair = [weights[f"{expert}.{n}_proj.weight"].cpu() for n in ("gate", "up")]
            found[f"{expert}.w13"] = fingerprint(quantize(torch.cat(pair)))
            found[f"{expert}.w2"] = fingerprint(
                quantize(weights[f"{expert}.down_proj.weight"].cpu())
            )
    return found


def overwrite_free_memory() -> None:
    """Return freed blocks and fill what the next allocations get with 0x7F."""
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    junk.fill_(0x7F)
    torch.cuda.synchronize()
    del junk
    torch.cuda.empty_cache()


def sync(llm: Any, weights: dict[str, torch.Tensor], path: str) -> None:
    """One sync by a path of docs/weight_sync.md."""
    worker = worker_of(llm)
    model = worker.model_runner.get_model()
    items = list(weights.items())
    if path == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(items)})
    elif path == "start/finish":
        from vllm.model_executor.model_loader import reload

        reload.initialize_layerwise_reload(model)
        for start in range(0, len(items), 64):
            model.load_weights(items[start : start + 64])
        reload.finalize_layerwise_reload(model, worker.vllm_config.model_config)
    elif path == "bucket":
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        for start in range(0, len(items), 64):
            model.load_weights([(n, t.clone()) for n, t in items[start : start + 64]])
        device = torch.device("cuda")
        process_weights_after_loading(model, worker.vllm_config.model_config, device)
    else:
        for name, tensor in reversed(items):
            buffer = tensor.clone()
            model.load_weights([(name, buffer)])
            buffer.fill_(float("nan"))


def big_config(folder: Path, layers: int = LAYERS) -> Path:
    """A model of Qwen3-30B-A3B's layer shapes, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    config |= {
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "num_hidden_layers": layers,
        "head_dim": 128,
    }
    config |= {"num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144}
    if "layer_types" in config:
        config["layer_types"] = ["full_attention"] * layers
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text((MODEL / name).read_text())
    return folder


def big_weights(layers: int = LAYERS) -> list[tuple[str, torch.Tensor]]:
    """All tensors of the big model's layers, on the GPU, under checkpoint names."""
    shapes = {
        "self_attn.q_proj": (4096, HIDDEN),
        "self_attn.k_proj": (512, HIDDEN),
        "self_attn.v_proj": (512, HIDDEN),
        "self_attn.o_proj": (HIDDEN, 4096),
        "mlp.gate": (EXPERTS, HIDDEN),
    }
    for e in range(EXPERTS):
        shapes[f"mlp.experts.{e}.gate_proj"] = (INNER, HIDDEN)
        shapes[f"mlp.experts.{e}.up_proj"] = (INNER, HIDDEN)
        shapes[f"mlp.experts.{e}.down_proj"] = (HIDDEN, INNER)
    return [
        (f"model.layers.{layer}.{name}.weight", torch.randn(s, device="cuda").bfloat16() * 0.02)
        for layer in range(layers)
        for name, s in shapes.items()
    ]
