"""What tests of compensation do inside a scheduler process; called like ``tests.sglang.inside``."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.sglang.inside import UNDO
from tests.vllm import recorder

CALLS: list[dict[str, Any]] = []


def compensator_of(model: nn.Module) -> Any:
    return model.quads_config.runtime.compensator


def worker_of(model: nn.Module) -> Any:
    """What ``tests.vllm.recorder`` looks at."""
    return SimpleNamespace(vllm_config=SimpleNamespace(quant_config=model.quads_config))


# The state ---------------------------------------------------------------------------------------


def lists(model: nn.Module) -> dict[str, dict[str, list]]:
    """The lists in force, with local ids, by site."""
    return {
        s.site.name: {
            "groups": list(s.site.groups),
            "blocks": s.selection.blocks.tolist(),
            "channels": s.selection.channels.tolist(),
        }
        for s in compensator_of(model).states
    }


def buffers(model: nn.Module) -> dict[str, Any]:
    """Addresses of all buffers, and which of them the model does not own."""
    owned = {b.data_ptr() for _, b in model.named_buffers()}
    tensors = {
        f"{s.site.name}/{name}": t
        for s in compensator_of(model).states
        for name, t in s.buffers().items()
    }
    lost = [name for name, t in tensors.items() if t.numel() and t.data_ptr() not in owned]
    return {
        "addresses": {name: t.data_ptr() for name, t in tensors.items()},
        "not owned": lost,
        "persistent": sorted(n for n in model.state_dict() if "quads_" in n),
    }


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every statistics and averages buffer, copied, with all rows counted."""
    compensator_of(model).count_staged()
    return {
        f"{s.site.name}/{name}": t.clone()
        for s in compensator_of(model).states
        for name, t in s.buffers().items()
        if not name.startswith("selection")
    }


def columns(model: nn.Module) -> dict[str, torch.Tensor]:
    """The BF16 columns by site, copied."""
    return {name: c.columns.clone() for name, c in compensator_of(model)._columns.items()}


def drop_channels(model: nn.Module) -> None:
    """No channel is hot any more: ``quads`` with the blocks that there are."""
    for state in compensator_of(model).states:
        state.selection.channels.fill_(-1)
        state.selection.hot_bits.zero_()


def drop_residual(model: nn.Module) -> None:
    """No block has its residual added any more."""
    for state in compensator_of(model).states:
        state.selection.block_mask.zero_()
        state.selection.blocks.fill_(-1)


# Rows that are counted ---------------------------------------------------------------------------


def start_recording(model: nn.Module, pad_to: int) -> None:
    """Keep every real row; pad what layers are given to a multiple of ``pad_to`` rows.

    How many rows are real comes from the batch's sequences, not from what the plugin looks at.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    compensator = compensator_of(model)
    compensator.forget()
    for state in compensator.states:
        state.statistics.offered.zero_()
    runner = SimpleNamespace(execute_model=lambda scheduled, call: call())
    recorder.start(SimpleNamespace(model_runner=runner))
    plain = ModelRunner.forward

    def forward(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        extends = batch.forward_mode.is_extend()
        tokens = sum(batch.extend_seq_lens_cpu) if extends else batch.batch_size
        scheduled = SimpleNamespace(total_num_scheduled_tokens=tokens)
        return runner.execute_model(scheduled, lambda: plain(self, batch, *args, **kwargs))

    ModelRunner.forward = forward
    UNDO.append(lambda: setattr(ModelRunner, "forward", plain))
    pad_layers(pad_to)


def pad_layers(multiple: int) -> None:
    """Give layers more rows than there are tokens, as captured graphs do, routed to experts."""
    from sglang_quads.fused_moe import QuadsMoEMethod
    from sglang_quads.linear import QuadsLinearMethod

    plain_moe, plain_linear = QuadsMoEMethod.apply, QuadsLinearMethod.apply

    def padded(x: torch.Tensor, value: float) -> torch.Tensor:
        more = -len(x) % multiple
        return torch.cat([x, x.new_full((more, *x.shape[1:]), value)])

    def moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
        x, topk = dispatch_output.hidden_states, dispatch_output.topk_output
        topk = topk._replace(
            topk_weights=padded(topk.topk_weights, 0.5), topk_ids=padded(topk.topk_ids, 0)
        )
        more = {"hidden_states": padded(x, recorder.POISON), "topk_output": topk}
        out = plain_moe(self, layer, dispatch_output._replace(**more))
        return out._replace(hidden_states=out.hidden_states[: len(x)])

    def linear(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return plain_linear(self, layer, padded(x, recorder.POISON), bias)[: len(x)]

    QuadsMoEMethod.apply, QuadsLinearMethod.apply = moe, linear
    UNDO.append(lambda: setattr(QuadsMoEMethod, "apply", plain_moe))
    UNDO.append(lambda: setattr(QuadsLinearMethod, "apply", plain_linear))


def compare(model: nn.Module) -> dict[str, Any]:
    """Statistics beside those recomputed from the recorded rows; recording ends."""
    found = recorder.compare(worker_of(model))
    from quads_common.compensation import linear, moe

    for module in (moe, linear):
        module.stage = recorder.plain_stage(module)
    while UNDO:
        UNDO.pop()()
    return found


# What layers compute -----------------------------------------------------------------------------


def record_layers(model: nn.Module) -> None:
    """Keep inputs, lists and outputs of every compensated layer from now on."""
    from quads_common.compensation import moe as compensated_moe
    from sglang_quads.fused_moe import QuadsMoEMethod
    from sglang_quads.linear import QuadsLinearMethod

    CALLS.clear()
    inner: list[tuple[int, torch.Tensor]] = []
    plain_moe, plain_linear = QuadsMoEMethod.apply, QuadsLinearMethod.apply
    plain_operands = compensated_moe.compensated_operands

    def operands(x: torch.Tensor, compensation: Any, group: int | None = None) -> Any:
        if group is None:
            return plain_operands(x, compensation)
        inner.append((group, x.clone()))
        return plain_operands(x, compensation, group)

    def moe(self: Any, layer: Any, dispatch_output: Any) -> Any:
        inner.clear()
        x, topk = dispatch_output.hidden_states.clone(), dispatch_output.topk_output
        combined = plain_moe(self, layer, dispatch_output)
        first, second = (in_force(i, layer) for i in self.inputs)
        CALLS.append(
            {
                "layer": self.prefix,
                "x": x,
                "topk_weights": topk.topk_weights.clone(),
                "topk_ids": topk.topk_ids.clone(),
                "out": combined.hidden_states.clone(),
                "inner": list(inner),
                "w13": first,
                "w2": second,
            }
        )
        return combined

    def linear(self: Any, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        out = plain_linear(self, layer, x, bias)
        found = {"layer": self.prefix, "x": x.clone(), "out": out.clone()}
        CALLS.append({**found, "linear": in_force(self.input, layer)})
        return out

    QuadsMoEMethod.apply, QuadsLinearMethod.apply = moe, linear
    compensated_moe.compensated_operands = operands
    UNDO.append(lambda: setattr(QuadsMoEMethod, "apply", plain_moe))
    UNDO.append(lambda: setattr(QuadsLinearMethod, "apply", plain_linear))
    UNDO.append(lambda: setattr(compensated_moe, "compensated_operands", plain_operands))


def in_force(given: Any, layer: nn.Module) -> dict[str, Any]:
    """Lists of an input from its site's state, not from what the layer handed on."""
    found = {name: tensor.clone() for name, tensor in given.state.selection.buffers().items()}
    return {**found, "columns": None if given.columns is None else given.columns.columns.clone()}


def recorded_layers(model: nn.Module) -> list[dict[str, Any]]:
    """What ``record_layers`` kept; recording ends."""
    while UNDO:
        UNDO.pop()()
    return list(CALLS)
