"""Engines that start together on one GPU and are timed one after the other.

Starting an engine takes far longer than timing it. With ``--together`` a benchmark starts all of
them at once, each waits until all have started, and then they take turns. Their memory must fit at
the same time. Two benchmarks share their turns if ``QUADS_BENCH_TURNS`` names one folder and
``QUADS_BENCH_ENGINES`` the number of engines of both.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ended", "my_turn", "turns_environment"]

FOLDER, COUNT = "QUADS_BENCH_TURNS", "QUADS_BENCH_ENGINES"
LONGEST_START = 400.0  # seconds


def turns_environment(folder: Path, engines: int) -> dict[str, str]:
    """For processes that take turns; what is set already is kept."""
    if FOLDER in os.environ:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.ready"):
        old.unlink()
    return {FOLDER: str(folder), COUNT: str(engines)}


def ended(environment: Mapping[str, str], name: str) -> None:
    """A process is over, perhaps before its turn: the others need not wait for it."""
    if FOLDER in environment:
        (Path(environment[FOLDER]) / f"{name}.ready").touch()


@contextmanager
def my_turn(name: str) -> Iterator[None]:
    """When all engines have started and no other one is timed; at once without turns.

    Raises:
        TimeoutError: the others did not start.
    """
    if FOLDER not in os.environ:
        yield
        return
    folder, deadline = Path(os.environ[FOLDER]), time.monotonic() + LONGEST_START
    ended(os.environ, name)
    while len(list(folder.glob("*.ready"))) < int(os.environ[COUNT]):
        if time.monotonic() > deadline:
            started = sorted(path.stem for path in folder.glob("*.ready"))
            raise TimeoutError(f"only {started} of {os.environ[COUNT]} engines have started")
        time.sleep(0.1)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
