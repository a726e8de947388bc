"""Wall-clock time of the phases of a training loop, as a table."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

import torch


class Phases:
    """``with phases("sync"): ...`` adds up; ``str(phases)`` is the table."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block, the device's work included."""
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        self.seconds[name].append(time.perf_counter() - start)

    def __str__(self) -> str:
        total = sum(map(sum, self.seconds.values()))
        lines = [f"{'phase':12s} {'calls':>5s} {'median ms':>10s} {'total s':>8s} {'share':>6s}"]
        for name, times in self.seconds.items():
            median = sorted(times)[len(times) // 2] * 1e3
            lines.append(
                f"{name:12s} {len(times):5d} {median:10.1f} {sum(times):8.2f} "
                f"{sum(times) / total:6.1%}"
            )
        return "\n".join(lines)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
