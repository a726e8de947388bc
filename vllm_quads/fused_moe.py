"""Routed experts: gate and up of an expert share one global scale, down has its own."""

from collections.abc import Callable

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from quads_common.activation import Activation
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.ops import form_backend, quads_moe_compensated
from quads_common.compensation.serving import choose_moe_backend
from quads_common.compensation.site import moe_sites
from quads_common.layer_weights import add_quantized_weight
from quads_common.ops import quads_moe
from quads_common.options import QuadsOptions
from quads_common.shards import ExpertShards
from quads_common.weight_tiles import TileLayout
from vllm_quads.experts import NamedExpertLoader, expert_shards
from vllm_quads.loading import finish_loading, load_themselves

__all__ = ["QuadsMoEMethod"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures no logger but its own


class QuadsMoEMethod(FusedMoEMethodBase):
    """NVFP4 routed experts, quantized expert by expert while they load."""

    def __init__(
        self,
        options: QuadsOptions,
        layer: nn.Module,
        prefix: str,
        load_format: str,
        backend: str,
        runtime: Runtime | None = None,
    ) -> None:
        """runtime: None for plain NVFP4."""
        super().__init__(layer.moe_config)
        self.options = options
        self.prefix = prefix
        self.load_format = load_format
        self.backend = backend
        active = options.compensation.active
        self.runtime = runtime if active("w13") or active("w2") else None
        self.inputs: tuple[LayerInput, LayerInput] | None = None
        self.activation = Activation(layer.activation.value, getattr(layer, "swiglu_limit", None))
        if self.moe.has_bias:
            raise NotImplementedError(
                f"{prefix}: experts with biases are not supported; add it to ignore"
            )

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register w13 [E, 2I, H/2], w2 [E, H, I/2] and scales; E and I are this rank's."""
        inner = intermediate_size_per_partition
        rule = self.options.global_scale_rule
        shards = expert_shards(self.prefix, layer, hidden_size, inner, self.activation.gated)
        tiled = self._choose_backend(num_experts, hidden_size, inner)
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
            (num_experts, hidden_size, inner),
            f"{self.prefix}.w2",
            ("w2",),
            shards.w2_regions,
            rule,
            TileLayout(gate_up=False) if tiled else None,
        )
        loader = NamedExpertLoader(shards, w13, w2)
        if self.runtime is not None:
            self.inputs = self._compensate(
                layer, shards, self.runtime, params_dtype, (w13.layout, w2.layout)
            )
            loader.arriving = self.runtime.compensator.weights_arrive
            loader.columns = (self.inputs[0].columns, self.inputs[1].columns)
        layer.w13_weight.weight_loader = loader.weight_loader
        layer.w2_weight.weight_loader = loader.weight_loader
        layer.load_weights = loader.named(layer, layer.load_weights)
        load_themselves(layer, [w13, w2], self._on_boundary())

    def _choose_backend(self, experts: int, hidden: int, inner: int) -> bool:
        """Settle this layer's backend, once, by its shape; whether its weights are tiled."""
        chosen, reason = choose_moe_backend(
            self.backend,
            self.options,
            self.runtime is not None,
            experts,
            hidden,
            inner,
            self.activation,
            shards=self.moe.moe_parallel_config.tp_size,
        )
        if reason is not None:
            logger.info_once(
                "quads_nvfp4: MoE layers run on backend %s, not %s: %s",
                chosen,
                self.backend,
                reason,
            )
        self.backend = chosen
        return chosen == "hopper"

    def _compensate(
        self,
        layer: nn.Module,
        shards: ExpertShards,
        runtime: Runtime,
        dtype: torch.dtype,
        layouts: tuple[TileLayout | None, TileLayout | None],
    ) -> tuple[LayerInput, LayerInput]:
        parallel = self.moe.moe_parallel_config
        sites = moe_sites(
            self.prefix,
            hidden=shards.hidden,
            inner=shards.inner,
            tp_size=parallel.tp_size,
            tp_rank=parallel.tp_rank,
            experts=list(shards.global_ids),
            num_experts=self.moe.num_experts,
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
                sites,
                (layer.w13_weight, layer.w2_weight),
                (1, self.moe.experts_per_token),
                layouts,
                strict=True,
            )
        )
        return first, second

    def _on_boundary(self) -> Callable[[], object] | None:
        return None if self.runtime is None else self.runtime.compensator.end_sync

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that all experts came; safe to call any number of times."""
        finish_loading(layer, self.load_format, self._on_boundary())

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: ``apply`` does everything itself."""
        return None

    def maybe_make_prepare_finalize(self, routing_tables=None) -> None:
        """None: no modular kernel (asked by vLLM up to 0.31 only)."""
        return None

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts=None,
        shared_experts_input=None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H], the part of this rank's experts or shards; vLLM reduces."""
        if self.inputs is not None:
            return self._apply_compensated(layer, self.inputs, x, topk_weights, topk_ids)
        return quads_moe(
            x,
            layer.w13_weight,
            layer.w13_weight_scale,
            layer.w13_weight_global_scale,
            layer.w2_weight,
            layer.w2_weight_scale,
            layer.w2_weight_global_scale,
            topk_weights,
            topk_ids,
            layer.expert_map,
            self.activation.name,
            self.activation.limit,
            self.options.act,
            layer.apply_router_weight_on_input,
            self.backend,
        )

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
            layer.expert_map,
            self.activation.name,
            self.activation.limit,
            layer.apply_router_weight_on_input,
            *first.selection(layer),
            *second.selection(layer),
            first.alpha,
            first.sample_map(layer, x.shape[0]),
            first.staged(layer) + second.staged(layer),
            form_backend(self.backend, self.options.compensation.exact),
        )
