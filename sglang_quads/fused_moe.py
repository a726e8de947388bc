"""Routed experts: gate and up of an expert share one global scale, down has its own."""

import functools
import logging
from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.moe.utils import get_moe_runner_backend
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase
from torch import nn

from quads_common.activation import Activation
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.ops import form_backend, quads_moe_compensated
from quads_common.compensation.serving import choose_moe_backend
from quads_common.compensation.site import moe_sites
from quads_common.layer_weights import add_quantized_weight
from quads_common.ops import quads_moe
from quads_common.options import QuadsOptions
from quads_common.shards import ExpertLoader, ExpertShards
from quads_common.weight_tiles import TileLayout
from sglang_quads.compensation import sample_map
from sglang_quads.loading import end_layer, finish_loading

__all__ = ["QuadsMoEMethod"]

log_info_once = functools.cache(logging.getLogger(__name__).info)


class QuadsMoEMethod(FusedMoEMethodBase):
    """NVFP4 routed experts, quantized expert by expert while they load."""

    def __init__(
        self,
        options: QuadsOptions,
        prefix: str,
        load_format: str,
        backend: str,
        runtime: Runtime | None = None,
    ) -> None:
        """runtime: None for plain NVFP4."""
        self.options = options
        self.prefix = prefix
        self.load_format = load_format
        self.backend = backend
        active = options.compensation.active
        self.runtime = runtime if active("w13") or active("w2") else None
        self.inputs: tuple[LayerInput, LayerInput] | None = None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        with_bias: bool = False,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register w13 [E, 2I, H/2], w2 [E, H, I/2] and scales; E and I are this rank's."""
        config = layer.moe_runner_config
        check_layer(layer, self.prefix, with_bias)
        name = config.activation if config.is_gated else f"{config.activation}_no_mul"
        self.activation = Activation(name, config.swiglu_limit)
        first = layer.moe_ep_rank * num_experts
        shards = ExpertShards(
            prefix=self.prefix,
            experts=layer.num_experts,
            global_ids=tuple(range(first, first + num_experts)),
            hidden=hidden_size,
            inner=intermediate_size_per_partition,
            gated=config.is_gated,
            tp_rank=layer.moe_tp_rank,
            tp_size=layer.moe_tp_size,
        )
        rule = self.options.global_scale_rule
        tiled = self._choose_backend(shards)
        w13 = add_quantized_weight(
            layer,
            "w13_weight",
            (num_experts, shards.w13_rows, hidden_size),
            f"{self.prefix}.w13",
            shards.w13_parts,
            shards.w13_regions,
            rule,
            TileLayout(gate_up=True) if tiled else None,
        )
        w2 = add_quantized_weight(
            layer,
            "w2_weight",
            (num_experts, hidden_size, intermediate_size_per_partition),
            f"{self.prefix}.w2",
            ("w2",),
            shards.w2_regions,
            rule,
            TileLayout(gate_up=False) if tiled else None,
        )
        loader = ExpertLoader(shards, w13, w2)
        if self.runtime is not None:
            self.inputs = self._compensate(
                layer, shards, self.runtime, params_dtype, (w13.layout, w2.layout)
            )
            loader.arriving = self.runtime.compensator.weights_arrive
            loader.columns = (self.inputs[0].columns, self.inputs[1].columns)
            layer.quads_boundary = self.runtime.compensator.end_sync
        layer.w13_weight.weight_loader = layer.w2_weight.weight_loader = weight_loader(loader)
        layer.quads_units = (w13, w2)
        layer.quads_loader = loader
        layer.quads_names = (f"{self.prefix}.",)

    def _choose_backend(self, shards: ExpertShards) -> bool:
        """Settle this layer's backend, once, by its shape; whether its weights are tiled."""
        chosen, reason = choose_moe_backend(
            self.backend,
            self.options,
            self.runtime is not None,
            len(shards.global_ids),
            shards.hidden,
            shards.inner,
            self.activation,
            shards=shards.tp_size,
        )
        if reason is not None:
            log_info_once(
                f"quads_nvfp4: MoE layers run on backend {chosen}, not {self.backend}: {reason}"
            )
        self.backend = chosen
        return chosen == "hopper"

    @staticmethod
    def _compensate(
        layer: nn.Module,
        shards: ExpertShards,
        runtime: Runtime,
        dtype: torch.dtype,
        layouts: tuple[TileLayout | None, TileLayout | None],
    ) -> tuple[LayerInput, LayerInput]:
        sites = moe_sites(
            shards.prefix,
            hidden=shards.hidden,
            inner=shards.inner,
            tp_size=shards.tp_size,
            tp_rank=shards.tp_rank,
            experts=shards.global_ids,
            num_experts=shards.experts,
        )
        first, second = (
            LayerInput(
                layer,
                site,
                runtime,
                units=weight.shape[0],
                rows=weight.shape[1],
                dtype=dtype,
                device=weight.device,
                top_k=top_k,
                layout=layout,
            )
            for site, weight, top_k, layout in zip(
                sites, (layer.w13_weight, layer.w2_weight), (1, layer.top_k), layouts, strict=True
            )
        )
        return first, second

    def create_moe_runner(self, layer: nn.Module, moe_runner_config: Any) -> None:
        """Nothing to create: ``apply`` does everything itself, from standard top-k output.

        Raises:
            ValueError: a runner backend was chosen, by the user or by SGLang for this model.
        """
        backend = get_moe_runner_backend()
        if not (backend.is_auto() or backend.is_triton()):
            raise ValueError(
                f"{self.prefix}: quads_nvfp4 has its own kernels and does not run with "
                f"--moe-runner-backend {backend.value}: use auto or triton"
            )

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """0.5.23 calls it when a weight update begins: the one before has ended."""
        end_layer(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that all experts came; safe to call any number of times."""
        finish_loading(layer, self.load_format)

    def apply(self, layer: nn.Module, dispatch_output: Any) -> StandardCombineInput:
        """[T, H] -> [T, H], the part of this rank's experts or shards; SGLang reduces.

        Expert ids are local already, -1 for other ranks' and for padding rows.
        """
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        config = layer.moe_runner_config
        weights = topk.topk_weights
        if x.is_cuda and config.routed_scaling_factor not in (None, 1):
            weights = weights * config.routed_scaling_factor  # elsewhere models do it themselves
        if self.inputs is not None:
            out = self._apply_compensated(layer, self.inputs, x, weights, topk.topk_ids)
            return StandardCombineInput(hidden_states=out)
        out = quads_moe(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_global_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_global_scale,
            weights,
            topk.topk_ids,
            None,
            self.activation.name,
            self.activation.limit,
            self.options.act,
            config.apply_router_weight_on_input,
            self.backend,
        )
        return StandardCombineInput(hidden_states=out)

    def _apply_compensated(
        self,
        layer: nn.Module,
        inputs: tuple[LayerInput, LayerInput],
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> torch.Tensor:
        first, second = inputs
        return quads_moe_compensated(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_global_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_global_scale,
            topk_weights,
            topk_ids,
            None,
            self.activation.name,
            self.activation.limit,
            layer.moe_runner_config.apply_router_weight_on_input,
            *first.selection(layer),
            *second.selection(layer),
            first.alpha,
            sample_map(first, layer, x, self.runtime),
            first.staged(layer) + second.staged(layer),
            form_backend(self.backend, self.options.compensation.exact),
        )


def check_layer(layer: nn.Module, prefix: str, with_bias: bool) -> None:
    """Refuse what the kernels do not compute.

    Raises:
        NotImplementedError: naming the feature and what to do.
    """
    config = layer.moe_runner_config
    refused = {
        "experts with biases are not supported; add it to ignore": with_bias,
        "gemm1_alpha and gemm1_clamp_limit (gpt-oss' activation) are not supported; add it to "
        "ignore": config.gemm1_alpha is not None or config.gemm1_clamp_limit is not None,
        "outputs that are not summed over the top-k (no_combine) are not supported; add it to "
        "ignore": config.no_combine,
        "shared experts are fused into the routed ones, which would quantize them: add "
        "--disable-shared-experts-fusion": layer.num_fused_shared_experts > 0,
        "presharded weights are not supported, their full amax is not known; add it to "
        "ignore": layer.use_presharded_weights,
    }
    for what, present in refused.items():
        if present:
            raise NotImplementedError(f"{prefix}: {what}")


def weight_loader(loader: ExpertLoader) -> Any:
    """The parameters' loader, with the signature of ``FusedMoE.weight_loader`` and ``_fused``."""

    def load(
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int | None = None,
    ) -> None:
        """``param`` is never read or written; expert_id is global, None for a stack of all."""
        if expert_id is None or loaded_weight.ndim == 3:
            loader.load_stack(loaded_weight, shard_id, weight_name)
        else:
            loader.load(loaded_weight, shard_id, expert_id)

    return load
