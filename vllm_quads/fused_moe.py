"""Routed experts: gate and up of an expert share one global scale, down has its own."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

from quads_common.activation import Activation
from quads_common.compensation.columns import SiteColumns
from quads_common.compensation.ops import quads_moe_compensated
from quads_common.compensation.site import moe_sites
from quads_common.format import BLOCK_SIZE
from quads_common.ops import quads_moe
from quads_common.options import QuadsOptions
from quads_common.weight_units import Piece, Region, WeightUnits, check_incoming
from vllm_quads.compensation import LayerInput, Runtime
from vllm_quads.loading import add_quantized_weight, finish_loading, load_themselves

__all__ = ["QuadsMoEMethod"]


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
        tp_size = self.moe.moe_parallel_config.tp_size
        check_sizes(self.prefix, hidden_size, intermediate_size_per_partition, tp_size)
        gated = self.activation.gated
        inner = intermediate_size_per_partition
        rule = self.options.global_scale_rule
        shards = ExpertShards(self.prefix, layer.expert_map, self.moe, hidden_size, inner, gated)
        w13 = add_quantized_weight(
            layer,
            "w13_weight",
            (num_experts, inner * (2 if gated else 1), hidden_size),
            f"{self.prefix}.w13",
            ("w1", "w3") if gated else ("w1",),
            shards.w13,
            rule,
        )
        w2 = add_quantized_weight(
            layer,
            "w2_weight",
            (num_experts, hidden_size, inner),
            f"{self.prefix}.w2",
            ("w2",),
            shards.w2,
            rule,
        )
        loader = ExpertLoader(self.prefix, w13, w2, layer.expert_map_manager, self.moe)
        if self.runtime is not None:
            self.inputs = self._compensate(layer, shards, self.runtime)
            loader.arriving = self.runtime.compensator.weights_arrive
            loader.columns = (self.inputs[0].columns, self.inputs[1].columns)
        layer.w13_weight.weight_loader = loader.load
        layer.w2_weight.weight_loader = loader.load
        layer.load_weights = loader.checked(layer.load_weights)
        load_themselves(layer, [w13, w2], self._on_boundary())

    def _compensate(
        self, layer: nn.Module, shards: "ExpertShards", runtime: Runtime
    ) -> tuple[LayerInput, LayerInput]:
        parallel = self.moe.moe_parallel_config
        experts = [shards.global_ids[local] for local in range(len(shards.global_ids))]
        sites = moe_sites(
            self.prefix,
            hidden=shards.hidden,
            inner=shards.inner,
            tp_size=parallel.tp_size,
            tp_rank=parallel.tp_rank,
            experts=experts,
            num_experts=self.moe.num_experts,
        )
        first, second = (
            LayerInput(
                layer,
                site,
                runtime,
                units=weight.shape[0],
                rows=weight.shape[1],
                device=weight.device,
            )
            for site, weight in zip(sites, (layer.w13_weight, layer.w2_weight), strict=True)
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
            first.statistics(layer) + second.statistics(layer),
            first.period,
            first.real_rows(layer, x.shape[0]),
            self.backend,
        )


def check_sizes(prefix: str, hidden: int, inner: int, tp_size: int) -> None:
    """Raise ``ValueError`` unless hidden size and a rank's intermediate size are whole blocks."""
    sizes = {"hidden size": (hidden, hidden), "intermediate size": (inner * tp_size, inner)}
    for what, (full, k) in sizes.items():
        if k % BLOCK_SIZE:
            raise ValueError(
                f"{prefix}: {what} {full} over tensor parallel size {tp_size} leaves {k} per rank, "
                f"which cuts a block of {BLOCK_SIZE}"
            )


class ExpertShards:
    """Where this rank's expert weights lie in the checkpoint's: names and offsets.

    expert_map: [global experts] local id or -1, None without expert parallelism.
    """

    def __init__(self, prefix: str, expert_map, moe, hidden: int, inner: int, gated: bool) -> None:
        self.prefix = prefix
        self.hidden = hidden
        self.inner = inner
        self.gated = gated
        self.tp_rank = moe.moe_parallel_config.tp_rank
        self.full_inner = inner * moe.moe_parallel_config.tp_size
        mapping = range(moe.num_experts) if expert_map is None else expert_map.tolist()
        self.global_ids = {local: e for e, local in enumerate(mapping) if local >= 0}

    def w13(self, unit: int) -> list[Region]:
        """Rows [gate | up] of a local expert; the full tensor has all gate rows first."""
        full = (self.full_inner * (2 if self.gated else 1), self.hidden)
        name = f"{self.prefix}.{self.global_ids[unit]}.w13"
        start = self.tp_rank * self.inner
        regions = [Region(name, 0, self.inner, start, 0, full)]
        if self.gated:
            up = self.full_inner + start
            regions.append(Region(name, self.inner, self.inner, up, 0, full))
        return regions

    def w2(self, unit: int) -> list[Region]:
        """All rows of a local expert, this rank's columns."""
        name = f"{self.prefix}.{self.global_ids[unit]}.w2"
        full = (self.hidden, self.full_inner)
        return [Region(name, 0, self.hidden, 0, self.tp_rank * self.inner, full)]


class ExpertLoader:
    """Takes full expert matrices or [E, N, K] stacks; writes this rank's share to the units.

    arriving: called before each tensor that this rank takes. columns: of w13 and w2, see
    ``SiteColumns``.
    """

    def __init__(self, prefix: str, w13: WeightUnits, w2: WeightUnits, expert_map_manager, moe):
        self.prefix = prefix
        self.w13 = w13
        self.w2 = w2
        self.expert_map_manager = expert_map_manager
        hidden, inner = w2.packed.shape[1], w2.packed.shape[2] * 2
        tp_size = moe.moe_parallel_config.tp_size
        start = moe.moe_parallel_config.tp_rank * inner
        # Shard id -> full shape in the checkpoint, and what this rank takes of it.
        up = (inner * tp_size, hidden)
        self.pieces = {
            "w1": (up, Piece(inner, row_offset=start)),
            "w3": (up, Piece(inner, first_row=inner, row_offset=start)),
            "w2": ((hidden, inner * tp_size), Piece(hidden, k_offset=start)),
        }
        self.arriving: Callable[[], object] | None = None
        self.columns: tuple[SiteColumns | None, SiteColumns | None] = (None, None)
        self.calls = 0
        self.experts = moe.num_experts

    def checked(
        self, load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]]
    ) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]]:
        """``RoutedExperts.load_weights`` that raises on a name no expert takes; vLLM skips it."""

        def watched(
            weights: Iterable[tuple[str, torch.Tensor]],
        ) -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                if weight.ndim == 3 and weight.shape[0] != self.experts:
                    raise ValueError(
                        f"{self.prefix}.{name}: expected {self.experts} experts, got shape "
                        f"{list(weight.shape)}"
                    )
                before = self.calls
                yield name, weight
                if self.calls == before:  # vLLM asks for the next one, and nothing took this one
                    raise ValueError(
                        f"{self.prefix}.{name}: no expert has such a weight (shape "
                        f"{list(weight.shape)})"
                    )

        return lambda weights: load_weights(watched(weights))

    def load(
        self,
        param: nn.Parameter,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """``RoutedExperts.weight_loader``'s signature; ``param`` is never read or written.

        expert_id is global. Experts of other ranks return False. A 3-D tensor holds one matrix per
        global expert.
        """
        self.calls += 1
        if loaded_weight.ndim == 3:
            results = [
                self._load_expert(matrix, f"{self.prefix}.{e}.{shard_id}", shard_id, e)
                for e, matrix in enumerate(loaded_weight)
            ]
            success = any(results)
        else:
            source = f"{self.prefix}.{expert_id}.{shard_id}"
            success = self._load_expert(loaded_weight, source, shard_id, expert_id)
        return success if return_success else None

    def _load_expert(
        self, matrix: torch.Tensor, source: str, shard_id: str, expert_id: int
    ) -> bool:
        unit = self.expert_map_manager.map_global_to_local(expert_id)
        if unit == -1:
            return False
        units = self.w2 if shard_id == "w2" else self.w13
        if shard_id not in units.parts:
            raise ValueError(f"{source}: shard id {shard_id!r} is not one of w1, w2, w3")
        full, piece = self.pieces[shard_id]
        check_incoming(matrix, full, source)
        if self.arriving is not None:
            self.arriving()
        columns = self.columns[units is self.w2]
        if columns is None:
            units.load(unit, shard_id, matrix, source, piece)
        else:
            columns.load(units, unit, shard_id, matrix, source, piece)
        return True
