"""A router kernel that vLLM's CPU wheels before 0.32 lack.

On a CPU those versions route inside their own unquantized MoE kernel only: any quantized MoE dies
in the router for want of ``_moe_C::topk_softmax``. To test the plugin against them the operator is
supplied in torch. Wheels that have it keep their own.
"""

import torch

__all__ = ["supply_topk_softmax"]

_SCHEMA = (
    "topk_softmax(Tensor(a!) topk_weights, Tensor(b!) topk_ids, Tensor(c!) token_expert_indices, "
    "Tensor gating_output, bool renormalize, Tensor? bias, Tensor? is_padding) -> ()"
)
_library = torch.library.Library("_moe_C", "FRAGMENT")


def supply_topk_softmax() -> None:
    """Register the operator if it is missing; does nothing the second time."""
    import vllm._custom_ops  # noqa: F401  (registers what the wheel has)

    if hasattr(torch.ops._moe_C, "topk_softmax"):
        return
    _library.define(_SCHEMA)
    _library.impl("topk_softmax", _topk_softmax, "CPU")
    _library.impl("topk_softmax", lambda *args: None, "Meta")


def _topk_softmax(weights, ids, token_expert_indices, gating, renormalize, bias, is_padding):
    if bias is not None or is_padding is not None:
        raise NotImplementedError("the stand-in router knows neither bias nor padding")
    values, chosen = torch.topk(torch.softmax(gating.float(), dim=-1), weights.shape[1])
    if renormalize:
        values = values / values.sum(dim=-1, keepdim=True)
    weights.copy_(values)
    ids.copy_(chosen)
