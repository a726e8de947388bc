"""Runs inside SGLang's scheduler process for ``check_sglang.py``, as a custom weight loader.

The name of the only "tensor" that comes is a JSON object: a function of this module and a file for
what it returns.
"""

import gc
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

CAN_RUN: list[Any] = []


def run(model: nn.Module, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """The custom weight loader."""
    call = json.loads(named_tensors[0][0])
    result = globals()[call["function"]](model)
    Path(call["out"]).write_text(json.dumps(result))


def overwrite_free_memory(model: nn.Module) -> None:
    """Return freed blocks and fill what the next allocations get with 0x7F."""
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    junk.fill_(0x7F)
    torch.cuda.synchronize()
    del junk
    torch.cuda.empty_cache()


def allocated(model: nn.Module) -> int:
    """Bytes of live tensors on the GPU."""
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def addresses(model: nn.Module) -> list[int]:
    """``data_ptr`` of every parameter."""
    return [p.data_ptr() for p in model.parameters()]


def lists(model: nn.Module) -> dict[str, Any]:
    """Blocks in force and addresses of all buffers of compensated inputs."""
    states = model.quads_config.runtime.compensator.states
    return {
        "blocks": {s.site.name: s.selection.blocks.tolist() for s in states},
        "addresses": [t.data_ptr() for s in states for t in s.buffers().values()],
    }


def statistics(model: nn.Module) -> dict[str, Any]:
    """What was counted, by input; then it is forgotten."""
    compensator = model.quads_config.runtime.compensator
    compensator.count_staged()
    found = {
        s.site.name: {
            "offered": int(s.statistics.offered),
            "count": s.statistics.count.tolist(),
            "mean": s.statistics.mean.double().tolist(),
            "m2": s.statistics.m2.double().tolist(),
        }
        for s in compensator.states
    }
    compensator.forget()
    for state in compensator.states:
        state.statistics.offered.zero_()
    return found


def graphs_off(model: nn.Module) -> None:
    """Decode without graphs from now on."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    CAN_RUN.append(DecodeCudaGraphRunner.can_run_graph)
    DecodeCudaGraphRunner.can_run_graph = lambda self, batch: False


def graphs_on(model: nn.Module) -> None:
    """Decode with graphs again."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    DecodeCudaGraphRunner.can_run_graph = CAN_RUN.pop()


def backends(model: nn.Module) -> dict[str, Any]:
    """Backend of each MoE layer."""
    methods = [getattr(m, "quant_method", None) for m in model.modules()]
    return {m.prefix: m.backend for m in methods if type(m).__name__ == "QuadsMoEMethod"}
