"""Several ranks in one process: threads whose all-reduce waits for all of them."""

import threading
from collections.abc import Callable
from typing import Any

import torch


def in_lockstep(count: int, run: Callable[[int, Callable[[torch.Tensor], None]], Any]) -> list[Any]:
    """``run(rank, all_reduce)`` on every rank at once; its results in order of rank."""
    barrier = threading.Barrier(count, timeout=60)
    boxes: list[Any] = [None] * count
    results: list[Any] = [None] * count

    def work(rank: int) -> None:
        def all_reduce(tensor: torch.Tensor) -> None:
            boxes[rank] = tensor.clone()
            barrier.wait()
            total = torch.stack(boxes).sum(dim=0)
            barrier.wait()
            tensor.copy_(total)

        try:
            results[rank] = run(rank, all_reduce)
        except BaseException as error:
            results[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
