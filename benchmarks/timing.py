"""Timing of GPU work in CUDA graphs, without launch overhead and with a cold L2 cache."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["copy_rate", "graph_time", "graph_times", "read_rate"]


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 20, rounds: int = 2) -> float:
    """Median microseconds of one call.

    calls: the same work on different buffers, larger together than the L2 cache, captured one after
    the other; ``rounds`` times in each graph.
    """
    return graph_times({"": calls}, replays, rounds)[""]


def graph_times(
    calls: Mapping[str, Sequence[Callable[[], object]]], replays: int = 20, rounds: int = 2
) -> dict[str, float]:
    """``graph_time`` of several, replayed in turns: the clock drifts over seconds."""
    graphs = {name: _captured(work, rounds) for name, work in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-3, replays):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 0:
                times[name].append(start.elapsed_time(end))
    return {
        name: statistics.median(found) * 1000 / (rounds * len(calls[name]))
        for name, found in times.items()
    }


def _captured(calls: Sequence[Callable[[], object]], rounds: int) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    return graph


def read_rate(gib: int = 4) -> float:
    """Bytes per second of a reduction over ``gib`` GiB: the ceiling of weight streaming."""
    buffers = [torch.ones(2**28 * gib // 4, device="cuda") for _ in range(4)]
    time = graph_time([lambda b=b: torch.sum(b) for b in buffers], 10, 1)
    return buffers[0].nbytes / time * 1e6


def copy_rate(nbytes: int, sets: int) -> float:
    """Bytes read and written per second by a copy that moves ``nbytes`` in all."""
    pairs = [
        [torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2)]
        for _ in range(sets)
    ]
    time = graph_time([lambda p=p: p[1].copy_(p[0]) for p in pairs], 20, 1)
    return nbytes / time * 1e6
