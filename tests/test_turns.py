"""Turns of engines that are timed together: threads stand in for the processes."""

import threading
import time

import pytest

from benchmarks import turns
from benchmarks.turns import Turns, ended, step_times, turns_environment


@pytest.fixture
def environment(tmp_path, monkeypatch):
    (tmp_path / "old.0").touch()
    variables = turns_environment(tmp_path, 3)
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    return variables


def run(names, body):
    threads = [threading.Thread(target=body, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_every_engine_has_a_turn_in_every_round(environment):
    log, timed = [], []

    def engine(name):
        time.sleep(0.2 if name == "slow" else 0)
        mine = Turns(name)
        for _ in range(3):
            with mine.turn():
                timed.append(name)
                time.sleep(0.02)
                assert timed[-1] == name  # nobody else meanwhile
            log.append(name)
        mine.stay()
        log.append("gone")

    run(("slow", "a", "b"), engine)
    assert [set(log[i : i + 3]) for i in (0, 3, 6)] == [{"slow", "a", "b"}] * 3
    assert log[9:] == ["gone"] * 3


def test_an_engine_that_failed_is_not_waited_for(environment):
    ended(environment, "broken")
    log = []

    def engine(name):
        mine = Turns(name)
        for _ in range(2):
            with mine.turn():
                log.append(name)
        mine.stay()

    run(("a", "b"), engine)
    assert sorted(log) == ["a", "a", "b", "b"]


def test_an_engine_that_never_starts_is_named(environment, monkeypatch):
    monkeypatch.setattr(turns, "LONGEST_WAIT", 0.1)
    mine, message = Turns("a"), r"only \['a'\] of 3 engines have had 0 turns"
    with pytest.raises(TimeoutError, match=message), mine.turn():
        pytest.fail("it had a turn")


def test_without_turns_nothing_waits(monkeypatch):
    monkeypatch.delenv(turns.FOLDER, raising=False)
    mine = Turns("a")
    with mine.turn():
        mine.stay()


def test_a_step_is_the_difference_of_two_runs(monkeypatch):
    monkeypatch.delenv(turns.FOLDER, raising=False)
    slow = iter((0.0, 0.5, 0.0))  # the second turn is disturbed

    def run(count, tokens):
        disturbed = next(slow) if tokens == turns.LONG else 0.0
        return 0.1 * count + 0.002 * count * tokens + disturbed

    assert step_times(run, Turns("a"), [5], 3) == {5: pytest.approx([10.0, 10.0 + 500 / 64, 10.0])}
