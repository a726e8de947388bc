"""Engines that start together on one GPU and are timed one after the other, in rounds.

Starting an engine takes far longer than timing it. With ``--together`` a benchmark starts all of
them at once; each waits until all have started, and then they take turns: one of every engine, then
the next round, so that a drift of the clock meets all. An engine that has had all its turns stays
until the others have, because one that ends frees its memory while the next one is timed. Their
memory must fit at the same time. Two benchmarks share their turns if ``QUADS_BENCH_TURNS`` names
one folder and ``QUADS_BENCH_ENGINES`` the number of engines of both.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Turns", "ended", "step_times", "turns_environment"]

FOLDER, COUNT = "QUADS_BENCH_TURNS", "QUADS_BENCH_ENGINES"
LONGEST_WAIT = 400.0  # seconds
ENDED = "ended"
SHORT, LONG = 16, 80  # output tokens of two runs that differ in their length only


def turns_environment(folder: Path, engines: int) -> dict[str, str]:
    """For processes that take turns; what is set already is kept."""
    if FOLDER in os.environ:
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    return {FOLDER: str(folder), COUNT: str(engines)}


def ended(environment: Mapping[str, str], name: str) -> None:
    """A process is over, perhaps before its turns: the others need not wait for it."""
    if FOLDER in environment:
        (Path(environment[FOLDER]) / f"{name}.{ENDED}").touch()


class Turns:
    """Those of one engine, which has started. All engines take as many. At once without turns."""

    def __init__(self, name: str) -> None:
        self._name, self._round = name, 0
        self._folder = Path(os.environ[FOLDER]) if FOLDER in os.environ else None
        self._note()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """When all engines have had the turn before, and no other one is timed.

        Raises:
            TimeoutError: some did not start, or have not come so far.
        """
        if self._folder is None:
            yield
            return
        self._wait()
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        self._round += 1
        self._note()

    def stay(self) -> None:
        """Until all engines have had as many turns as this one. Raises as ``turn``."""
        if self._folder is not None:
            self._wait()

    def _note(self) -> None:
        if self._folder is not None:
            (self._folder / f"{self._name}.{self._round}").touch()

    def _wait(self) -> None:
        assert self._folder is not None
        deadline = time.monotonic() + LONGEST_WAIT
        while len(there := self._as_far()) < int(os.environ[COUNT]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"only {sorted(there)} of {os.environ[COUNT]} engines have had "
                    f"{self._round} turns"
                )
            time.sleep(0.05)

    def _as_far(self) -> set[str]:
        assert self._folder is not None
        suffixes = (f".{self._round}", f".{ENDED}")
        return {path.stem for path in self._folder.iterdir() if path.suffix in suffixes}


def step_times(
    run: Callable[[int, int], float], turns: Turns, counts: list[int], repeats: int
) -> dict[int, list[float]]:
    """Milliseconds of a decode step by number of sequences, one of each of ``repeats`` turns.

    run: of a number of sequences and of output tokens for each, the seconds that it took.
    """
    found: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        with turns.turn():
            for count in counts:
                run(count, SHORT)  # warms up
                short, long = run(count, SHORT), run(count, LONG)
                found[count].append((long - short) / (LONG - SHORT) * 1e3)
    return found
