"""vLLM's MoE layers on the same weights: BF16, FP8 in 128x128 blocks, Marlin with NVFP4."""

from collections.abc import Callable
from types import SimpleNamespace

import torch

from benchmarks.moe_data import Layer, Routing

__all__ = ["peers", "reference"]

Call = Callable[[Layer, Routing], torch.Tensor]


def peers(names: list[str], layers: list[Layer], failures: list[str]) -> dict[str, Call]:
    """Callables of those layers that this vLLM can build; ``failures`` gets why one can't."""
    result: dict[str, Call] = {}
    for name in names:
        try:
            result[name] = BUILDERS[name](layers)
        except Exception as error:  # a peer that is missing must not stop the others
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    return result


def reference(layer: Layer, routing: Routing) -> torch.Tensor:
    """The layer with BF16 weights, sums in float32 rounded where vLLM rounds: [T, H] float32."""
    out = torch.zeros_like(routing.x, dtype=torch.float32)
    for expert in routing.ids.unique().tolist():
        token, slot = torch.where(routing.ids == expert)
        y = (routing.x[token].float() @ layer.w13_bf16[expert].float().T).to(torch.bfloat16)
        gate, up = y.float().chunk(2, dim=-1)
        hidden = (torch.nn.functional.silu(gate) * up).to(torch.bfloat16)
        y = hidden.float() @ layer.w2_bf16[expert].float().T
        out.index_add_(0, token, y * routing.weights[token, slot].unsqueeze(1))
    return out


def _bf16(layers: list[Layer]) -> Call:
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    return lambda layer, r: fused_experts(r.x, layer.w13_bf16, layer.w2_bf16, r.weights, r.ids)


def _fp8(layers: list[Layer]) -> Call:
    from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    for layer in layers:
        w13, w13_scale = _fp8_blocks(layer.w13_bf16)
        w2, w2_scale = _fp8_blocks(layer.w2_bf16)
        config = fp8_w8a8_moe_quant_config(
            w1_scale=w13_scale, w2_scale=w2_scale, block_shape=[128, 128]
        )
        layer.extra["fp8"] = (w13, w2, config)

    def call(layer: Layer, r: Routing) -> torch.Tensor:
        w13, w2, config = layer.extra["fp8"]
        return fused_experts(r.x, w13, w2, r.weights, r.ids, quant_config=config)

    return call


def _fp8_blocks(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, N, K] to float8_e4m3fn and float32 scales [E, N/128, K/128]."""
    e, n, k = w.shape
    out = torch.empty_like(w, dtype=torch.float8_e4m3fn)
    scales = torch.empty((e, n // 128, k // 128), device=w.device)
    for expert in range(e):
        blocks = w[expert].float().reshape(n // 128, 128, k // 128, 128)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448
        out[expert] = (blocks / scale).reshape(n, k).to(torch.float8_e4m3fn)
        scales[expert] = scale.reshape(n // 128, k // 128)
    return out, scales


def _marlin(layers: list[Layer]) -> Call:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4
    from vllm.scalar_type import scalar_types

    for layer in layers:
        experts, _, hidden = layer.w13.shape
        shell = SimpleNamespace(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size_per_partition=layer.w2.shape[2],
            params_dtype=torch.bfloat16,
        )
        with set_current_vllm_config(VllmConfig()):
            tensors = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
                shell,
                layer.w13.packed, layer.w13.block_scale, layer.w13.global_scale,
                layer.w2.packed, layer.w2.block_scale, layer.w2.global_scale,
                is_act_and_mul=True,
            )  # fmt: skip
        layer.extra["marlin"] = (*tensors, shell.workspace)

    def call(layer: Layer, r: Routing) -> torch.Tensor:
        w13, w13_scale, w13_global, w2, w2_scale, w2_global, workspace = layer.extra["marlin"]
        return fused_marlin_moe(
            r.x, w13, w2, None, None, w13_scale, w2_scale, r.weights, r.ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_scale1=w13_global, global_scale2=w2_global, workspace=workspace,
        )  # fmt: skip

    return call


BUILDERS = {"bf16": _bf16, "fp8": _fp8, "marlin": _marlin}
