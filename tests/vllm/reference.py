"""transformers forwards of a checkpoint with quantized experts: what the engine is held against.

The W4A4 experts are written here from the contract (quantize each token, unscaled operands, global
scales on the accumulator, the rounding points of the design) in float64 or in float32 with a chosen
order of summation; only ``quantize`` itself is shared with the engine.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from quads_common.packing import unscaled_values
from quads_common.quantize import dequantize, quantize

Matmul = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def load(path: Path, dtype: torch.dtype, attention: str = "sdpa") -> torch.nn.Module:
    """The checkpoint in transformers, its experts run one by one."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=attention, experts_implementation="eager"
    ).eval()


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The stacked expert modules, layer by layer."""
    return [m for m in model.modules() if hasattr(m, "gate_up_proj") and hasattr(m, "down_proj")]


def quantize_weights(model: torch.nn.Module, rule: str = "pow2") -> None:
    """Replace every expert weight by what it decodes to (W4A16)."""
    for experts in experts_of(model):
        for weight in (experts.gate_up_proj, experts.down_proj):
            q = quantize(weight.data, global_scale_rule=rule)
            weight.data.copy_(dequantize(q, weight.dtype))


def use_w4a4(model: torch.nn.Module, matmul: Matmul) -> None:
    """Replace the experts' forward by W4A4 with the given float32 matmul ([M, K] @ [K, N])."""
    for experts in experts_of(model):
        w13, w2 = decoded(experts.gate_up_proj.data), decoded(experts.down_proj.data)

        def forward(hidden_states, top_k_index, top_k_weights, w13=w13, w2=w2):
            return w4a4_experts(hidden_states, w13, w2, top_k_weights, top_k_index, matmul)

        experts.forward = forward


def decoded(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unscaled float32 values [E, N, K] and global scales [E] of stacked expert weights."""
    q = quantize(weight)
    return unscaled_values(q.packed, q.block_scale), q.global_scale


def w4a4_experts(x, w13, w2, topk_weights, topk_ids, matmul: Matmul) -> torch.Tensor:
    """[T, H] -> [T, H]; every (token, slot) on its own, summed in slot order."""
    a, scale = _operand(x)
    out = torch.zeros((*topk_ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, slot = torch.where(topk_ids == expert)
        y = matmul(a[token], w13[0][expert].T) * (scale[token] * w13[1][expert])
        y = y.to(x.dtype)
        gate, up = y.float().chunk(2, dim=-1)
        hidden, hidden_scale = _operand((F.silu(gate) * up).to(x.dtype))
        y = matmul(hidden, w2[0][expert].T) * (hidden_scale * w2[1][expert])
        out[token, slot] = y * topk_weights[token, slot].float().unsqueeze(1)
    total = out[:, 0]
    for slot in range(1, topk_ids.shape[1]):
        total = total + out[:, slot]
    return total.to(x.dtype)


def plain_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32, in whatever order the library sums."""
    return a @ b


def split_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """float32, K cut into four parts from the back to the front: another legal order."""
    parts = zip(a.chunk(4, dim=1), b.chunk(4, dim=0), strict=True)
    total = torch.zeros((a.shape[0], b.shape[1]))
    for left, right in reversed(list(parts)):
        total = total + left @ right
    return total


def reorder_linears(model: torch.nn.Module) -> None:
    """Sum every other linear layer in that other order too (float32, rounded once)."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            weight = module.weight

            def forward(x, weight=weight):
                flat = x.reshape(-1, x.shape[-1]).float()
                return split_matmul(flat, weight.float().T).to(x.dtype).reshape(*x.shape[:-1], -1)

            module.forward = forward


@torch.no_grad()
def logprobs(model: torch.nn.Module, sequences: list[list[int]]) -> list[torch.Tensor]:
    """Log-prob of every token of each sequence but the first, given those before it."""
    found: dict[int, torch.Tensor] = {}
    for length in {len(ids) for ids in sequences}:
        rows = [i for i, ids in enumerate(sequences) if len(ids) == length]
        tokens = torch.tensor([sequences[i] for i in rows])
        logits = model(tokens).logits[:, :-1].float()
        chosen = torch.log_softmax(logits, dim=-1).gather(2, tokens[:, 1:].unsqueeze(2))
        found.update(zip(rows, chosen.squeeze(2), strict=True))
    return [found[i] for i in range(len(sequences))]


def _operand(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = quantize(x, per_token=True)
    return unscaled_values(q.packed, q.block_scale), q.global_scale
