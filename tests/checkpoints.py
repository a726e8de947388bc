"""Checkpoints that the tests of both engines use."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

__all__ = ["ARITH_MOE", "changed", "small_dense"]

ARITH_MOE = Path(__file__).parents[1] / "examples/models/arith-moe"


def changed(source: Path, target: Path, seed: int) -> Path:
    """A second checkpoint: experts and linears three times as large, everything a little other."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values = tensor.float()
        if name.endswith("_proj.weight"):  # so that global scales move too
            values = values * 3
        noise = torch.randn(values.shape, generator=generator)
        weights[name] = (values * (1 + 0.01 * noise)).to(tensor.dtype)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def small_dense(target: Path) -> Path:
    """A small random dense Qwen3 with arith-moe's tokenizer."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(ARITH_MOE)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
