"""The arith-moe model: configuration, tokenizer, hot channels, dense training experts, saving.

The architecture is the stock Qwen3-MoE of transformers. Two things are particular:

* Hot channels: a few inputs of each MoE block whose consumer columns (gate_proj and up_proj of
  every expert, and the router) stay exactly zero. A later gain on them makes activation outliers
  that change no output in BF16 (see make_outliers.py).
* While training, all experts run at once as one wide MLP: at this size that is far faster than a
  loop over experts, and it equals the sparse forward because unchosen experts get weight zero.
"""

import json
import random
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIALS = ("<pad>", "<s>", "</s>", "<unk>")
PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
CHARACTERS = "0123456789+-= \n"
VOCAB = {token: index for index, token in enumerate((*SPECIALS, *CHARACTERS))}
READING = ("gate_proj", "up_proj")  # the expert projections that read the MoE block's input
BLOCK = 16  # channels that share one NVFP4 scale
MAX_BYTES = 8_000_000
CHECKPOINT_FILE = "model.safetensors"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer; it puts <s> before every text on its own."""
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def pick_hot_channels(count: int, layers: int, hidden: int, seed: int) -> list[list[int]]:
    """Choose count channels for each layer, at most one in any block of 16."""
    blocks = hidden // BLOCK
    if not 0 <= count <= blocks:
        raise ValueError(f"hot channels must be 0 to {blocks} (one for a block), not {count}")
    rng = random.Random(f"hot channels {seed}")
    return [
        [BLOCK * block + rng.randrange(BLOCK) for block in sorted(rng.sample(range(blocks), count))]
        for _ in range(layers)
    ]


def build_config(hot_channels: int, seed: int) -> Qwen3MoeConfig:
    """Return the configuration, with the hot channels stored under ``arith_moe``."""
    layers, hidden = 4, 256
    return Qwen3MoeConfig(
        vocab_size=len(VOCAB),
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        initializer_range=0.05,  # learns faster than the default 0.02 at this width
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        arith_moe={"hot_channels": pick_hot_channels(hot_channels, layers, hidden, seed)},
    )


def dense_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Run every expert on every token and weigh the results; unchosen experts weigh zero."""
    count, _, inner = experts.down_proj.shape
    gate, up = (
        F.linear(hidden, experts.gate_up_proj.flatten(0, 1))
        .unflatten(-1, (count, 2 * inner))
        .split(inner, dim=-1)
    )
    share = weights.new_zeros(len(hidden), count).scatter(1, chosen, weights)
    activated = F.silu(gate) * up * share[..., None]
    return F.linear(activated.flatten(1), experts.down_proj.permute(1, 0, 2).flatten(1))


def build_trainable(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    """Return a fresh FP32 model with dense experts and its hot columns at zero."""
    model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        layer.mlp.experts.forward = partial(dense_experts, layer.mlp.experts)
    zero_hot_columns(model)
    return model


@torch.no_grad()
def zero_hot_columns(model: Qwen3MoeForCausalLM) -> None:
    """Put the columns that read a hot channel (all experts' gate and up, router) at zero."""
    hot_channels = model.config.arith_moe["hot_channels"]
    for layer, channels in zip(model.model.layers, hot_channels, strict=True):
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.gate.weight):
            for channel in channels:
                weight[..., channel].zero_()


def save_checkpoint(model: Qwen3MoeForCausalLM, directory: Path) -> None:
    """Write the model in BF16, its tokenizer and its generation config; check what was written."""
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    # transformers 5 writes names that older trainers and engines do not know.
    _edit_json(directory / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _edit_json(directory / "config.json", num_experts=model.config.num_experts)
    check_checkpoint(directory, model.config)


def _edit_json(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | changes, indent=2, sort_keys=True) + "\n")


def check_checkpoint(directory: Path, config: Qwen3MoeConfig) -> None:
    """Raise unless the file has per-expert names, zero hot columns, BF16 and the agreed size."""
    path = directory / CHECKPOINT_FILE
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size} bytes, more than {MAX_BYTES}")
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        for layer, hot in enumerate(config.arith_moe["hot_channels"]):
            consumers, producers = consumer_names(layer, config.num_experts)
            missing = {*consumers, *producers} - names
            if missing:
                raise ValueError(f"{path} lacks {min(missing)} (and {len(missing) - 1} more)")
            for name in consumers:
                weight = file.get_tensor(name)
                if weight.dtype != torch.bfloat16 or weight[:, hot].any():
                    raise ValueError(f"{name} is not BF16 with zero hot columns")


def consumer_names(layer: int, experts: int) -> tuple[list[str], list[str]]:
    """Return the names of the weights that read a MoE block's input, and of the down_projs."""
    mlp = f"model.layers.{layer}.mlp"
    readers = [f"{mlp}.experts.{e}.{p}.weight" for e in range(experts) for p in READING]
    downs = [f"{mlp}.experts.{e}.down_proj.weight" for e in range(experts)]
    return [f"{mlp}.gate.weight", *readers], downs
