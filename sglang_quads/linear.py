"""Linear layers: the parts of a fused group share one global scale and are quantized together."""

from typing import Any

import torch
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.quantization.base_config import LinearMethodBase
from torch import nn

from quads_common.compensation.layers import LayerInput, Runtime
from quads_common.compensation.ops import form_backend, quads_linear_compensated
from quads_common.compensation.serving import ROWS_ARE_NO_TOKENS
from quads_common.compensation.site import linear_site
from quads_common.format import BLOCK_SIZE
from quads_common.layer_weights import add_quantized_weight
from quads_common.ops import quads_linear
from quads_common.options import QuadsOptions
from quads_common.shards import LinearLoader, LinearPart, linear_regions
from sglang_quads.compensation import sample_map
from sglang_quads.loading import end_layer, finish_loading

__all__ = ["QuadsLinearMethod"]

# Layers whose loaders cut full checkpoint tensors by rows or columns of the rank.
KNOWN_LOADERS = tuple(
    kind.weight_loader
    for kind in (
        ReplicatedLinear,
        ColumnParallelLinear,
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
)


class QuadsLinearMethod(LinearMethodBase):
    """NVFP4 linear layer, quantized while it loads.

    The name must not be one of SGLang's: it picks loaders by class name.
    """

    def __init__(
        self,
        options: QuadsOptions,
        prefix: str,
        members: list[str],
        load_format: str,
        backend: str,
        runtime: Runtime | None = None,
    ) -> None:
        """members: checkpoint names of the modules that SGLang fuses into ``prefix``.

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
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight`` [N, K/2] and its scales; N and K are this rank's."""
        k = input_size_per_partition
        if k % BLOCK_SIZE:
            raise ValueError(
                f"{self.prefix}: K = {input_size} over tensor parallel size {input_size // k} "
                f"leaves {k} per rank, which cuts a block of {BLOCK_SIZE}"
            )
        check_loader(layer, self.prefix)
        parts = linear_parts(layer, output_partition_sizes, output_size)
        k_rank = getattr(layer, "tp_rank", 0)
        regions = linear_regions(self.members, parts, k, input_size, k_rank)
        units = add_quantized_weight(
            layer,
            "weight",
            (sum(output_partition_sizes), k),
            self.prefix,
            list(parts),
            lambda unit: regions,
            self.options.global_scale_rule,
        )
        loader = LinearLoader(units, parts, input_size, k_rank)
        if self.runtime is not None:
            self.input = LayerInput(
                layer,
                linear_site(self.prefix, width=k, full_width=input_size, tp_rank=k_rank),
                self.runtime,
                units=1,
                rows=sum(output_partition_sizes),
                dtype=params_dtype,
                device=layer.weight.device,
                counted=self.prefix.rpartition(".")[2] not in ROWS_ARE_NO_TOKENS,
            )
            loader.arriving = self.runtime.compensator.weights_arrive
            loader.columns = self.input.columns
            layer.quads_boundary = self.runtime.compensator.end_sync
        layer.weight.weight_loader = weight_loader(loader)
        layer.quads_units = (units,)
        layer.quads_loader = loader
        layer.quads_names = tuple(f"{name}.weight" for name in self.members)

    def restore_weights_before_loading(self, layer: nn.Module) -> None:
        """0.5.23 calls it when a weight update begins: the one before has ended."""
        end_layer(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Check that all weights came; safe to call any number of times."""
        finish_loading(layer, self.load_format)

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
        return quads_linear_compensated(
            x,
            layer.weight,
            layer.weight_scale,
            layer.weight_global_scale,
            bias,
            *lists,
            None if columns is None else columns[0],
            given.alpha,
            sample_map(given, layer, x, self.runtime),
            given.staged(layer),
            form_backend(self.backend, self.options.compensation.exact),
        )


def check_loader(layer: nn.Module, prefix: str) -> None:
    """Refuse layers whose checkpoint tensors are not full matrices cut by rank.

    Raises:
        NotImplementedError: a class with a loader of its own, or presharded weights.
    """
    if type(layer).weight_loader not in KNOWN_LOADERS:
        raise NotImplementedError(
            f"{prefix}: linear layers of class {type(layer).__name__} load weights in a way of "
            "their own; add it to ignore"
        )
    if getattr(layer, "use_presharded_weights", False):
        raise NotImplementedError(
            f"{prefix}: presharded weights are not supported, their full amax is not known; add it "
            "to ignore"
        )


def linear_parts(
    layer: nn.Module, partition_sizes: list[int], output_size: int
) -> dict[str, LinearPart]:
    """Parts by the shard id of SGLang's loaders (as text), in the order of the rows."""
    rank = getattr(layer, "tp_rank", 0)
    if isinstance(layer, QKVParallelLinear):
        kv_rank = rank // layer.num_kv_head_replicas
        sizes = (
            layer.total_num_heads * layer.head_size,
            layer.total_num_kv_heads * layer.head_size,
            layer.total_num_kv_heads * layer.v_head_size,
        )
        ranks = (rank, kv_rank, kv_rank)  # fewer kv heads than ranks: several hold the same ones
        return {
            part: LinearPart(rows, full, part_rank)
            for part, rows, full, part_rank in zip(
                "qkv", partition_sizes, sizes, ranks, strict=True
            )
        }
    if isinstance(layer, MergedColumnParallelLinear):
        pairs = zip(partition_sizes, layer.output_sizes, strict=True)
        return {str(i): LinearPart(rows, full, rank) for i, (rows, full) in enumerate(pairs)}
    return {"weight": LinearPart(sum(partition_sizes), output_size, rank)}


def weight_loader(loader: LinearLoader) -> Any:
    """The parameter's loader, with the signature of SGLang's."""

    def load(param: nn.Parameter, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
        """``param`` is never read or written."""
        loader.load(loaded_weight, loaded_shard_id)

    return load
