"""Routed experts as vLLM hands them out: its loaders' signatures and names."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from quads_common.shards import ExpertLoader, ExpertShards

__all__ = ["NamedExpertLoader", "expert_shards"]


def expert_shards(
    prefix: str, layer: nn.Module, hidden: int, inner: int, gated: bool
) -> ExpertShards:
    """What this rank holds of a layer's experts; inner: its share of I.

    Raises as ``ExpertShards``.
    """
    parallel = layer.moe_config.moe_parallel_config
    mapping = layer.expert_map
    everyone = range(layer.moe_config.num_experts) if mapping is None else mapping.tolist()
    held = sorted((local, e) for e, local in enumerate(everyone) if local >= 0)
    return ExpertShards(
        prefix=prefix,
        experts=layer.moe_config.num_experts,
        global_ids=tuple(e for _, e in held),
        hidden=hidden,
        inner=inner,
        gated=gated,
        tp_rank=parallel.tp_rank,
        tp_size=parallel.tp_size,
    )


class NamedExpertLoader(ExpertLoader):
    """``ExpertLoader`` behind the two functions that vLLM calls."""

    def weight_loader(
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
        if loaded_weight.ndim == 3:
            self.load_stack(loaded_weight, shard_id, f"{self.shards.prefix}.{shard_id}")
            success = bool(self.shards.global_ids)
        else:
            success = self.load(loaded_weight, shard_id, expert_id)
        return success if return_success else None

    def named(
        self,
        layer: nn.Module,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]],
    ) -> Callable[[Iterable[tuple[str, torch.Tensor]]], Iterator[str]]:
        """``RoutedExperts.load_weights`` that looks the usual names up and raises on unknown ones.

        vLLM's own compares a name with those of all experts (up to 0.31), makes the list of them on
        every call, and skips what matches none. Stacks and unusual names still go through it.
        """
        table: dict[str, tuple[str, int, str]] = {}

        def load(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[str]:
            if not table:
                table.update(expert_names(layer))
            for name, weight in weights:
                found = table.get(name) if weight.ndim == 2 else None
                if found is None:
                    yield from self._load_unusual(load_weights, name, weight)
                    continue
                param_name, expert, shard = found
                if self.load(weight, shard, expert):
                    yield param_name

        return load

    def _load_unusual(
        self,
        load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], Iterable[str]],
        name: str,
        weight: torch.Tensor,
    ) -> Iterator[str]:
        if weight.ndim == 3 and weight.shape[0] != self.shards.experts:
            raise ValueError(
                f"{self.shards.prefix}.{name}: expected {self.shards.experts} experts, got shape "
                f"{list(weight.shape)}"
            )
        before = self.calls
        yield from load_weights([(name, weight)])
        if self.calls == before:
            raise ValueError(
                f"{self.shards.prefix}.{name}: no expert has such a weight (shape "
                f"{list(weight.shape)})"
            )


def expert_names(layer: nn.Module) -> dict[str, tuple[str, int, str]]:
    """Parameter name, global expert id and shard id by checkpoint name, from vLLM's own mapping.

    Names are relative to the layer: ``3.gate_proj.weight``. Empty where a layer has no such mapping
    (vLLM 0.24).
    """
    if not hasattr(layer, "get_expert_mapping"):
        return {}
    last = layer.layer_name.rpartition(".")[2] + "."
    found = {}
    for param_name, weight_name, expert, shard in layer.get_expert_mapping():
        if param_name.startswith(last) and weight_name.startswith(last):
            name = weight_name.removeprefix(last) + "weight"
            found[name] = (param_name.removeprefix(last) + "weight", expert, shard)
    return found
