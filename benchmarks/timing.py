"""Timing of GPU work in CUDA graphs, without launch overhead and with a cold L2 cache."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

__all__ = ["cache_reader", "copy_rate", "graph_time", "graph_times", "read_rate"]


def graph_time(calls: Sequence[Callable[[], object]], replays: int = 20, rounds: int = 2) -> float:
    """Median microseconds of one call.

    calls: the same work on different buffers, larger together than the L2 cache, captured one after
    the other; ``rounds`` times in each graph.
    """
    return graph_times({"": calls}, replays, rounds)[""]


def graph_times(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    replays: int = 20,
    rounds: int = 2,
    before: Sequence[Callable[[], object]] = (),
) -> dict[str, float]:
    """``graph_time`` of several, replayed in turns: the clock drifts over seconds.

    before: what runs in front of each call, for every one of them; its time alone is subtracted.
    """
    graphs = {
        name: _captured([f for pair in zip(before, work, strict=True) for f in pair], rounds)
        if before
        else _captured(work, rounds)
        for name, work in calls.items()
    }
    alone = _captured(before, rounds) if before else None
    times: dict[str, list[float]] = {name: [] for name in calls}
    others: list[float] = []
    for turn in range(-3, replays):
        found = {name: _replay(graph) / len(calls[name]) for name, graph in graphs.items()}
        other = _replay(alone) / len(before) if alone else 0.0
        if turn >= 0:
            others.append(other)
            for name, time in found.items():
                times[name].append(time)
    return {
        name: (statistics.median(found) - statistics.median(others)) * 1000 / rounds
        for name, found in times.items()
    }


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


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


def cache_reader(nbytes: int) -> Callable[[], object]:
    """Reads so many bytes of its own, and so evicts others from the L2 cache."""
    own = torch.ones(nbytes // 4, device="cuda")
    result = torch.empty((), device="cuda")
    return lambda: torch.sum(own, dim=0, out=result)


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
