"""What the tests do inside a scheduler process, where the model is.

SGLang calls a ``--custom-weight-loader`` as ``run(model, named_tensors)`` in every rank when
tensors are "updated" with its name as the load format. The only name that comes is a JSON object:
which function of this module to call (or "MODULE:function" of this folder's), with what, and where
to save what it returns.
"""

import gc
import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quads_common.layer_weights import all_units
from sglang_quads import sync

RECORDED: list[dict[str, Any]] = []
UNDO: list[Any] = []


def run(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader."""
    from sglang.srt.distributed import get_tp_group

    call = json.loads(named_tensors[0][0])
    module, _, name = call["function"].rpartition(":")
    source = importlib.import_module(f"tests.sglang.{module or 'inside'}")
    result = getattr(source, name)(model, *call["arguments"])
    rank = get_tp_group().rank_in_group
    torch.save(result, Path(call["out"]).with_suffix(f".{rank}.pt"))


def units(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Every quantized unit of this rank by name."""
    found = {}
    for group in all_units(model):
        for index in range(group.count):
            q = group.quantized(index)
            found[f"{group.name}[{index}]"] = {
                "packed": q.packed.clone(),
                "block_scale": q.block_scale.view(torch.uint8).clone(),
                "global_scale": q.global_scale.clone(),
            }
    return found


def experts(model: nn.Module) -> dict[str, list[int]]:
    """Global ids of this rank's experts by local index, per MoE layer."""
    from quads_common.shards import ExpertLoader

    loaders = [getattr(m, "quads_loader", None) for m in model.modules()]
    shards = [x.shards for x in loaders if isinstance(x, ExpertLoader)]
    return {s.prefix: list(s.global_ids) for s in shards}


def look(model: nn.Module) -> dict[str, Any]:
    """Bytes of this rank's unquantized parameters and addresses of everything."""
    hashes, addresses = {}, {}
    quantized = {
        id(p)
        for module in model.modules()
        if hasattr(module, "quads_units")
        for p in module._parameters.values()
    }
    for name, parameter in model.named_parameters():
        addresses[name] = parameter.data_ptr()
        if id(parameter) not in quantized:
            data = parameter.detach().float().numpy().tobytes()
            hashes[name] = hashlib.sha256(data).hexdigest()
    for group in all_units(model):
        for field in ("packed", "block_scale", "global_scale"):
            addresses[f"{group.name}.{field}"] = getattr(group, field).data_ptr()
    return {"hashes": hashes, "addresses": addresses}


def memory(model: nn.Module) -> dict[str, int]:
    """Bytes of all live tensors, each storage once, and of what is staged."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and not thing.is_meta:
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return {"live": sum(storages.values()), "staged": staged(model)}


def staged(model: nn.Module) -> int:
    """Bytes of BF16 that units hold while they are incomplete."""
    return sum(o.buffer.nbytes for u in all_units(model) for o in u._open.values())


def open_units(model: nn.Module) -> int:
    """Number of incomplete units."""
    return sum(len(u._open) for u in all_units(model))


def stop_quantizing(model: nn.Module) -> None:
    """The bug that this plugin exists against: new weights never reach the packed ones."""
    from quads_common.weight_units import WeightUnits

    original = WeightUnits.load
    WeightUnits.load = lambda self, *args: True
    UNDO.append(lambda: setattr(WeightUnits, "load", original))


def undo(model: nn.Module) -> None:
    """Take back what this module patched."""
    while UNDO:
        UNDO.pop()()


def lose_weights(model: nn.Module) -> None:
    """What a release of memory does on a GPU with the memory saver."""
    sync.forget_weights(model, ["weights"], discards=True)


def error_of_running(model: nn.Module) -> str:
    """What a forward pass would raise before it starts."""
    try:
        sync.refuse_lost(model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def record(model: nn.Module) -> None:
    """Keep inputs, routing, quantized activations and outputs of every MoE call from now on."""
    from quads_common import gemm
    from sglang_quads.fused_moe import QuadsMoEMethod

    RECORDED.clear()
    quantized: list[dict[str, torch.Tensor]] = []
    plain_apply, plain_quantize = QuadsMoEMethod.apply, gemm.quantize

    def recording_quantize(x: torch.Tensor, **kwargs: Any) -> Any:
        q = plain_quantize(x, **kwargs)
        quantized.append(
            {
                "x": x.clone(),
                "packed": q.packed,
                "block_scale": q.block_scale.view(torch.uint8),
                "global_scale": q.global_scale,
            }
        )
        return q

    def recording_apply(method: Any, layer: Any, dispatch_output: Any) -> Any:
        quantized.clear()
        x, topk = dispatch_output.hidden_states.clone(), dispatch_output.topk_output
        combined = plain_apply(method, layer, dispatch_output)
        RECORDED.append(
            {
                "layer": method.prefix,
                "x": x,
                "topk_weights": topk.topk_weights.clone(),
                "topk_ids": topk.topk_ids.clone(),
                "out": combined.hidden_states.clone(),
                "quantized": list(quantized),
            }
        )
        return combined

    QuadsMoEMethod.apply, gemm.quantize = recording_apply, recording_quantize
    UNDO.append(lambda: setattr(QuadsMoEMethod, "apply", plain_apply))
    UNDO.append(lambda: setattr(gemm, "quantize", plain_quantize))


def recorded(model: nn.Module) -> list[dict[str, Any]]:
    """What ``record`` kept; recording ends."""
    undo(model)
    return list(RECORDED)


def stand_in_for_checkpoint_engine(model: nn.Module) -> None:
    """Supply what ``update_weights_from_ipc`` imports; it needs CUDA and a package.

    The transport is a file. Everything after it is SGLang's own: the worker extension, the model's
    ``load_weights``, the post hook (which fails without CUDA, and SGLang only logs that).
    """
    import sys
    import types

    from safetensors.torch import load_file

    def update_weights_from_ipc(context, path, device_id, run, post_hook):
        items = list(load_file(path).items())
        for start in range(0, len(items), 60):
            run(items[start : start + 60])
        post_hook()

    package = types.ModuleType("checkpoint_engine")
    worker = types.ModuleType("checkpoint_engine.worker")
    worker.update_weights_from_ipc = update_weights_from_ipc
    sys.modules.update({"checkpoint_engine": package, "checkpoint_engine.worker": worker})
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker

    extension = checkpoint_engine_worker.SGLangCheckpointEngineWorkerExtensionImpl
    extension.get_device_uuid = lambda self: "cpu"
    extension.get_device_id = lambda self: 0
