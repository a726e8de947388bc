"""Linear layers: the parts of a fused group share one global scale and are quantized together."""

from collections.abc import Callable

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    LinearMethodBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)

from quads_common.compensation.columns import SiteColumns
from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.ops import form_backend, quads_linear_compensated
from quads_common.compensation.serving import ROWS_ARE_NO_TOKENS
from quads_common.compensation.site import linear_site
from quads_common.format import BLOCK_SIZE
from quads_common.layer_weights import add_quantized_weight
from quads_common.ops import quads_linear
from quads_common.options import QuadsOptions
from quads_common.shards import LinearPart, linear_regions
from quads_common.weight_units import WeightUnits, check_incoming
from vllm_quads.loading import finish_loading, load_themselves

__all__ = ["QuadsLinearMethod"]


class QuadsLinearMethod(LinearMethodBase):
    """NVFP4 linear layer, quantized while it loads."""

    def __init__(
        self,
        options: QuadsOptions,
        prefix: str,
        members: list[str],
        load_format: str,
        backend: str,
        runtime: Runtime | None = None,
    ) -> None:
        """members: checkpoint names of the modules that vLLM fuses into ``prefix``.

        runtime: None for plain NVFP4.
        """
        self.options = options
        self.prefix = prefix
        self.members = members
        self.load_format = load_format
        self.backend = backend
        self.runtime = runtime if options.compensation.active("linear") else None
        self.input: LayerInput | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Register ``weight`` [N, K/2] and its scales; N and K are this rank's."""
        if input_size_per_partition % BLOCK_SIZE:
            raise ValueError(
                f"{self.prefix}: K = {input_size} over tensor parallel size "
                f"{input_size // input_size_per_partition} leaves {input_size_per_partition} per "
                f"rank, which cuts a block of {BLOCK_SIZE}"
            )
        layer.logical_widths = output_partition_sizes
        layer.input_size_per_partition = input_size_per_partition
        layer.output_size_per_partition = sum(output_partition_sizes)
        parts = _parts(layer, output_partition_sizes, output_size)
        regions = linear_regions(
            self.members, parts, input_size_per_partition, input_size, layer.tp_rank
        )
        units = add_quantized_weight(
            layer,
            "weight",
            (sum(output_partition_sizes), input_size_per_partition),
            self.prefix,
            list(parts),
            lambda unit: regions,
            self.options.global_scale_rule,
        )
        loader = LinearLoader(units, parts, input_size, extra_weight_attrs["weight_loader"])
        if self.runtime is not None:
            self.input = LayerInput(
                layer,
                linear_site(
                    self.prefix,
                    width=input_size_per_partition,
                    full_width=input_size,
                    tp_rank=layer.tp_rank,
                ),
                self.runtime,
                units=1,
                rows=sum(output_partition_sizes),
                dtype=params_dtype,
                device=layer.weight.device,
                counted=self.prefix.rpartition(".")[2] not in ROWS_ARE_NO_TOKENS,
            )
            loader.arriving = self.runtime.compensator.weights_arrive
            loader.columns = self.input.columns
        layer.weight.weight_loader = loader.load
        load_themselves(layer, [units], self._on_boundary())

    def _on_boundary(self) -> Callable[[], object] | None:
        return None if self.runtime is None else self.runtime.compensator.end_sync

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that all weights came; safe to call any number of times."""
        finish_loading(layer, self.load_format, self._on_boundary())

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[..., K] -> [..., N]."""
        if self.input is not None:
            return self._apply_compensated(layer, self.input, x, bias)
        return quads_linear(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            bias,
            self.options.act,
            self.backend,
        )

    def _apply_compensated(
        self, layer: nn.Module, given: LayerInput, x: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        *lists, columns = given.selection(layer)
        countable = x.ndim == 2  # rows of another layout are no list of tokens
        return quads_linear_compensated(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            bias,
            *lists,
            None if columns is None else columns[0],
            given.alpha,
            given.sample_map(layer, x.shape[0]) if countable else None,
            given.staged(layer),
            form_backend(self.backend, self.options.compensation.exact),
        )


class LinearLoader:
    """Takes full checkpoint tensors of a linear group; vLLM's own loader cuts this rank's shard.

    parts: by shard id as text. input_size: full K.
    engine_loader: the layer's ``weight_loader``. arriving: called before each tensor. columns: see
    ``SiteColumns``.
    """

    def __init__(
        self, units: WeightUnits, parts: dict[str, LinearPart], input_size: int, engine_loader
    ):
        self.units = units
        self.parts = parts
        self.input_size = input_size
        self.engine_loader = engine_loader
        self.arriving: Callable[[], object] | None = None
        self.columns: SiteColumns | None = None

    def load(self, param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id=None) -> None:
        """The parameter's ``weight_loader``; ``param`` itself is never read or written."""
        parts = self._parts_of(loaded_shard_id)
        source = self.units.name
        if parts != list(self.parts):
            source += f" ({', '.join(parts)})"
        rows = sum(self.parts[part].full_rows for part in parts)
        check_incoming(loaded_weight, (rows, self.input_size), source)
        if self.arriving is not None:
            self.arriving()
        stage = nn.Parameter(self.units.stage(0), requires_grad=False)
        stage.output_dim, stage.input_dim = 0, 1
        args = () if loaded_shard_id is None else (loaded_shard_id,)
        self.engine_loader(stage, loaded_weight, *args)
        if self.columns is None:
            self.units.arrived(0, parts, loaded_weight, source)
        else:
            self.columns.arrived(self.units, 0, parts, loaded_weight, source)

    def _parts_of(self, shard_id: str | int | tuple[int, ...] | None) -> list[str]:
        if shard_id is None:
            return list(self.parts)
        ids = shard_id if isinstance(shard_id, tuple) else (shard_id,)
        return [str(i) for i in ids]


def _parts(layer: nn.Module, partition_sizes: list[int], output_size: int) -> dict[str, LinearPart]:
    """Parts by the shard id of vLLM's loaders (as text), in order; what this rank holds of each."""
    rank = layer.tp_rank
    if isinstance(layer, QKVParallelLinear):
        value_size = getattr(layer, "v_head_size", layer.head_size)
        kv_rank = rank // layer.num_kv_head_replicas  # several ranks may hold the same heads
        sizes = (
            (layer.total_num_heads * layer.head_size, rank),
            (layer.total_num_kv_heads * layer.head_size, kv_rank),
            (layer.total_num_kv_heads * value_size, kv_rank),
        )
        return {
            part: LinearPart(rows, full, part_rank)
            for part, rows, (full, part_rank) in zip("qkv", partition_sizes, sizes, strict=True)
        }
    if isinstance(layer, MergedColumnParallelLinear) and not isinstance(layer, RowParallelLinear):
        pairs = zip(partition_sizes, layer.output_sizes, strict=True)
        return {str(i): LinearPart(rows, full, rank) for i, (rows, full) in enumerate(pairs)}
    return {"weight": LinearPart(sum(partition_sizes), output_size, rank)}
