"""Every row that compensated layers are given in a worker, and statistics recomputed from them.

``start`` and ``compare`` are worker functions for ``collective_rpc``. The rows are taken where a
layer keeps those that are sampled; how many of a forward's rows are real comes from the
scheduler's output, read at the model runner, not from the plugin. The recomputation is float64 and
two-pass.
"""

import dataclasses
from typing import Any

import torch

POISON = 1e4


class Recorder:
    """rows: per address of an input's staged rows, the real rows and their local experts."""

    def __init__(self) -> None:
        self.rows: dict[int, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        self.real = 0
        self.forwards: list[tuple[int, int]] = []  # tokens scheduled, rows that a layer was given


_recorder = Recorder()


def start(worker: Any, pad_to: int = 1) -> None:
    """Record from now on; pad every forward to a multiple of ``pad_to`` rows, full of poison."""
    global _recorder
    from quads_common.compensation import linear, moe

    recorder = _recorder = Recorder()
    runner = worker.model_runner
    plain_execute = runner.execute_model

    def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.real = scheduler_output.total_num_scheduled_tokens
        return plain_execute(scheduler_output, *args, **kwargs)

    runner.execute_model = execute_model
    if pad_to > 1:
        pad_forwards(runner, pad_to)
    for module in (moe, linear):
        module.stage = recording(recorder, plain_stage(module))


def plain_stage(module: Any) -> Any:
    """The function itself, however often it was wrapped."""
    return getattr(module.stage, "plain", module.stage)


def recording(recorder: Recorder, plain: Any) -> Any:
    """``stage`` that keeps the real rows and spoils the others."""

    def stage(staging: Any, x: torch.Tensor, expert_ids: torch.Tensor | None = None) -> None:
        x[recorder.real :] = POISON
        ids = None if expert_ids is None else expert_ids[: recorder.real].clone()
        kept = (x[: recorder.real].clone(), ids)
        recorder.rows.setdefault(staging.rows.data_ptr(), []).append(kept)
        recorder.forwards.append((recorder.real, x.shape[0]))
        plain(staging, x, expert_ids)

    stage.plain = plain
    return stage


def pad_forwards(runner: Any, multiple: int) -> None:
    """Make the runner pad as it does for CUDA graphs."""
    dispatch = runner.cudagraph_dispatcher.dispatch

    def padded(num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        mode, descriptor = dispatch(num_tokens, *args, **kwargs)
        rows = -(-descriptor.num_tokens // multiple) * multiple
        if dataclasses.is_dataclass(descriptor):
            return mode, dataclasses.replace(descriptor, num_tokens=rows)
        return mode, descriptor._replace(num_tokens=rows)

    runner.cudagraph_dispatcher.dispatch = padded


def compare(worker: Any) -> dict[str, Any]:
    """Largest relative error of each statistic over all sites and groups, and what was counted."""
    from quads_common.quantize import dequantize, quantize

    runtime = worker.vllm_config.quant_config.runtime
    runtime.count_staged()
    states = runtime.compensator.states
    worst: dict[str, float] = {}
    counts, wrong = {}, []
    for state in states:
        stats = state.statistics
        staged = runtime._inputs.get(state.site.name)
        recorded = [] if staged is None else _recorder.rows.get(staged.rows.data_ptr(), [])
        counts[state.site.name] = [int(n) for n in stats.count]
        for group in range(len(state.site.groups)):
            rows = [x if ids is None else x[ids == group] for x, ids in recorded]
            x = torch.cat([r.reshape(-1, state.site.width) for r in rows] or [torch.zeros(0, 16)])
            if len(x) != int(stats.count[group]):
                wrong.append(f"{state.site.name}[{group}]: {len(x)} rows, {stats.count[group]=}")
                continue
            if len(x) == 0:
                continue
            values = x.double()
            lost = values - dequantize(quantize(x, per_token=True), torch.float32).double()
            expected = {
                "mean": values.mean(dim=0),
                "m2": (values - values.mean(dim=0)).square().sum(dim=0),
                "plain_energy": lost.square().unflatten(1, (-1, 16)).sum(dim=(0, 2)),
            }
            for name, value in expected.items():
                scale = value.abs().max() if name == "mean" else value.abs()
                error = (getattr(stats, name)[group] - value).abs() / scale.clamp(min=1e-30)
                worst[name] = max(worst.get(name, 0.0), float(error.max()))
    offered = {int(state.statistics.offered) for state in states}
    return {
        "worst": worst,
        "wrong": wrong,
        "counts": counts,
        "offered": sorted(offered),
        "forwards": list(_recorder.forwards),
    }
