"""Tiny transformers models, and the same models with decoded weights."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from quads_common import dequantize, quantize

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
STACKS = ("gate_up_proj", "down_proj")
FUSED = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


def moe(dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: object) -> nn.Module:
    """Qwen3-MoE with 8 experts; every expert matrix, and gate and up, of another magnitude."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8, **changes))
    with torch.no_grad():
        for stack in expert_stacks(model):
            stack.mul_(torch.linspace(0.5, 1.5, len(stack)).view(-1, 1, 1))
            stack[:, : stack.shape[1] // 2].mul_(1.7)
    return model.to(dtype)


def dense(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Module:
    """Qwen3 with biases in attention; q, k, v (and gate, up) of different magnitudes."""
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, attention_bias=True))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
            for factor, child in ((3.0, "q_proj"), (0.3, "v_proj"), (2.1, "up_proj")):
                if f"{child}.weight" in name:
                    parameter.mul_(factor)
    return model.to(dtype)


def gpt_oss(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """GPT-OSS: transposed stacks, gate and up interleaved, biases."""
    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = GptOssForCausalLM(GptOssConfig(**sizes, layer_types=["full_attention"] * 2))
    return model.to(dtype)


def expert_stacks(model: nn.Module) -> list[nn.Parameter]:
    """The stacked expert parameters."""
    return [p for n, p in model.named_parameters() if n.rpartition(".")[2] in STACKS]


def decoded(weights: Iterable[torch.Tensor], **options: object) -> list[torch.Tensor]:
    """``dequantize(quantize(W))`` of weights that share one global scale, in their dtypes."""
    weights = list(weights)
    parts = quantize(torch.cat([w.to(torch.bfloat16) for w in weights], dim=-2), **options)
    values = dequantize(parts).split([w.shape[-2] for w in weights], dim=-2)
    return [v.to(w.dtype) for v, w in zip(values, weights, strict=True)]


@torch.no_grad()
def with_decoded_experts(model: nn.Module, **options: object) -> nn.Module:
    """A copy whose expert stacks hold the decoded values."""
    model = copy.deepcopy(model)
    for stack in expert_stacks(model):
        transposed = model.config.model_type == "gpt_oss"
        matrices = stack.mT.contiguous() if transposed else stack
        for e, matrix in enumerate(matrices):
            (value,) = decoded([matrix.detach()], **options)
            stack[e].copy_(value.mT if transposed else value)
    return model


@torch.no_grad()
def with_decoded_linears(model: nn.Module, **options: object) -> nn.Module:
    """A copy of a dense model whose attention and MLP linears hold the decoded values."""
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for group in FUSED:
                linears = [getattr(parent, child) for child in group if hasattr(parent, child)]
                if linears:
                    values = decoded([m.weight for m in linears], **options)
                    for linear, value in zip(linears, values, strict=True):
                        linear.weight.copy_(value)
    return model


REPLACED: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "moe": (moe, with_decoded_experts),
    "dense": (dense, with_decoded_linears),
    "gpt_oss": (gpt_oss, with_decoded_experts),
}


def tokens(rows: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    """Random token ids [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)
