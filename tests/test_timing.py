"""What ``benchmarks/timing.py`` makes of the times of graphs."""

import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def counted_graphs(monkeypatch):
    """Graphs that take as many microseconds as their calls return."""

    def captured(calls, rounds):
        return [call() for _ in range(rounds) for call in calls]

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(timing, "_replay", lambda graph: sum(graph) / 1000)


CALLS = {"plain": [lambda: 10.0] * 6, "other": [lambda: 12.0, lambda: 14.0]}


def test_the_time_of_one_call():
    assert timing.graph_time(CALLS["other"]) == pytest.approx(13.0)
    assert timing.graph_times(CALLS) == pytest.approx({"plain": 10.0, "other": 13.0})


def test_what_runs_before_a_call_is_subtracted():
    calls = {"plain": [lambda: 10.0] * 2, "other": CALLS["other"]}
    before = [lambda: 5.0, lambda: 7.0]
    found = timing.graph_times(calls, rounds=3, before=before)
    assert found == pytest.approx({"plain": 10.0, "other": 13.0})


def test_every_call_has_its_own():
    with pytest.raises(ValueError, match="zip"):
        timing.graph_times(CALLS, before=[lambda: 5.0] * 2)
