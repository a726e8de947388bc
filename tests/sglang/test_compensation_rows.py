"""Which rows count, the radix cache, metrics: small parts that need no engine."""

from types import SimpleNamespace

import pytest
import torch

from quads_common.compensation.metrics import HELP, SiteMetrics
from quads_common.compensation.ranks import SelectionsDifferError
from quads_common.options import QuadsOptions
from sglang_quads import actions, compat, compensation, hooks, metrics
from sglang_quads.compensation import (
    FlushState,
    most_tokens,
    note_changes,
    real_tokens,
    rows_unknown,
    sample_map,
)

pytestmark = pytest.mark.sglang


def server_args(**changes):
    """What the plugin looks at."""
    defaults = {
        "tp_size": 2,
        "dp_size": 1,
        "chunked_prefill_size": 24,
        "max_prefill_tokens": 64,
        "max_running_requests": 8,
        "enable_metrics": False,
    }
    return SimpleNamespace(**{**defaults, **changes})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, None),
        ({"dp_size": 2}, None),
        ({"enable_dp_attention": True}, "data parallel attention"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"enable_prefill_cp": True}, "context parallelism"),
        ({"enable_nsa_prefill_context_parallel": True}, "context parallelism"),
        ({"enable_attn_tp_input_scattered": True}, "scattered inputs"),
        ({"enable_pdmux": True}, "prefill and decode at the same time"),
        ({"dllm_algorithm": "LowConfidence"}, "diffusion language models"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_where_rows_are_not_known(changes, reason):
    found = rows_unknown(server_args(**changes))
    assert found is None if reason is None else found.startswith(reason)


@pytest.fixture
def one_rank(monkeypatch):
    """Outside an engine there is no group of ranks."""
    group = SimpleNamespace(world_size=1, rank_in_group=0, ranks=[0], cpu_group=None)
    for module in (compensation, actions):
        monkeypatch.setattr(module, "get_tp_group", lambda: group)


@pytest.mark.parametrize("changes, warnings", [({}, 0), ({"enable_dp_attention": True}, 1)])
def test_statistics_that_stay_off_are_told(one_rank, monkeypatch, changes, warnings):
    told = []
    monkeypatch.setattr(compensation.logger, "warning", lambda *args: told.append(args))
    runtime = compensation.new_runtime(QuadsOptions(), server_args(**changes), 128)
    assert len(told) == warnings
    assert runtime.period == (0 if warnings else 64)
    runtime.sample_map(torch.device("cpu"))
    sampled = [runtime.begin(32) for _ in range(4)]
    assert sum(sampled) == (0 if warnings else 2), "one token of each 64"


@pytest.mark.parametrize(
    "changes, tokens",
    [
        ({}, 24 + 8),
        ({"chunked_prefill_size": -1}, 128 + 8),
        ({"chunked_prefill_size": None, "max_prefill_tokens": 256}, 256 + 8),
        ({"max_running_requests": None}, 24 + 4096),
    ],
    ids=["chunks", "whole prompts", "many prompts", "any number of requests"],
)
def test_rows_of_the_largest_forward(changes, tokens):
    assert most_tokens(server_args(**changes), context=128) == tokens


def batch(rows=5, idle=False, rids=("a", "b")):
    """A ``ForwardBatch`` before it is padded."""
    mode = SimpleNamespace(is_idle=lambda: idle)
    return SimpleNamespace(input_ids=torch.zeros(rows), forward_mode=mode, rids=rids)


@pytest.mark.parametrize(
    "given, tokens",
    [
        (batch(), 5),
        (batch(rids=None), 5),
        (batch(rows=8), 8),
        (batch(rows=9), 0),
        (batch(idle=True), 0),
        (batch(rids=("a", "HEALTH_CHECK_1")), 0),
        (batch(rids=(f"{compensation.WARM_UP}-1",)), 0),
    ],
    ids=["tokens", "no ids", "the most", "too many", "idle", "health check", "warm-up"],
)
def test_tokens_of_a_batch(given, tokens):
    assert real_tokens(given, most=8) == tokens


def test_larger_inputs_have_no_map():
    """Those of SGLang's own dummy runs may be larger than any forward of the scheduler's."""
    runtime = SimpleNamespace(max_tokens=8)
    given = SimpleNamespace(sample_map=lambda layer, tokens: tokens)
    for shape, found in (((8, 16), 8), ((9, 16), None), ((2, 3, 16), None)):
        assert sample_map(given, None, torch.zeros(shape), runtime) == found


class Runner:
    """A model runner whose model has a runtime that notes what is begun and ended."""

    def __init__(self):
        self.calls = []
        runtime = SimpleNamespace(
            max_tokens=8,
            begin=lambda tokens: self.calls.append(tokens) or tokens > 0,
            end=lambda: self.calls.append("end"),
        )
        self.model = SimpleNamespace(quads_config=SimpleNamespace(runtime=runtime))


def test_the_map_is_cleared_after_each_forward_even_a_failing_one():
    runner = Runner()
    assert hooks.run_forward(lambda *_: "out", runner, batch(3)) == "out"
    assert (
        hooks.run_forward(lambda *_, **__: "out", runner, forward_batch=batch(idle=True)) == "out"
    )

    def failing(*_):
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.run_forward(failing, runner, batch(4))
    assert runner.calls == [3, "end", 0, 4, "end"]


class Request:
    """Of a scheduler; ends when it is told to."""

    def __init__(self):
        self.ended = False

    def finished(self):
        return self.ended


class Scheduler:
    """SGLang's, as far as the radix cache goes. ``last_batch`` is drained by the next round."""

    def __init__(self, disable_radix_cache=False):
        self.flushes, self.state, self.busy = 0, FlushState(), False
        self.waiting_queue, self.chunked_req, self.last_batch = [], None, None
        self.running_batch = SimpleNamespace(reqs=[])
        self.server_args = SimpleNamespace(disable_radix_cache=disable_radix_cache)
        model = SimpleNamespace(quads_config=SimpleNamespace(flush=self.state, runtime=object()))
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.taken = []  # (request, flushes before it was looked up)

    def is_fully_idle(self):
        drained = self.last_batch is None and not self.running_batch.reqs
        return drained and not self.busy and not self.waiting_queue

    def flush_cache(self):
        good = self.is_fully_idle()
        self.flushes += good
        hooks.note_flush(good, self)

    def run(self, request):
        self.running_batch.reqs.append(request)
        self.last_batch = SimpleNamespace(reqs=[request])

    def get_next_batch_to_run(self):
        self.taken += [(request, self.flushes) for request in self.waiting_queue]
        self.waiting_queue = []
        self.running_batch.reqs = [r for r in self.running_batch.reqs if not r.ended]
        self.last_batch = self.running_batch if self.running_batch.reqs else None

    def step(self):
        hooks.flush_changed(Scheduler.get_next_batch_to_run, self)


def runtime(version, start=0, digest="a"):
    state = {"version": version, "start_version": start, "shared": {"w13": digest}}
    return SimpleNamespace(compensator=SimpleNamespace(state=lambda: state))


@pytest.fixture
def told(monkeypatch):
    """Warnings about the radix cache."""
    found = []
    monkeypatch.setattr(compensation.logger, "warning", lambda text, *args: found.append(text))
    return found


def test_the_radix_cache_is_flushed_once_for_each_change(one_rank, told):
    scheduler = Scheduler()
    note_changes(runtime(1, start=1), scheduler.state)
    scheduler.step()
    assert scheduler.flushes == 0, "a selection file at the start is no change"
    for version, flushes in ((2, 1), (2, 1), (3, 2)):
        note_changes(runtime(version, start=1), scheduler.state)
        scheduler.step()
        scheduler.step()
        assert scheduler.flushes == flushes
    assert not told


@pytest.mark.parametrize("disabled, warnings", [(False, 2), (True, 0)])
def test_a_flush_waits_for_running_requests(one_rank, told, disabled, warnings):
    """While they run, others are taken in; when none does, the flush comes before the next."""
    scheduler, running = Scheduler(disabled), Request()
    scheduler.run(running)
    for version in (1, 2):
        note_changes(runtime(version), scheduler.state)
        scheduler.waiting_queue.append(f"request {version}")
        for _ in range(3):
            scheduler.step()
    assert scheduler.taken == [("request 1", 0), ("request 2", 0)]
    assert scheduler.flushes == 0 and len(told) == warnings
    running.ended = True  # but is not drained when the next request is there
    scheduler.waiting_queue.append("request 3")
    for _ in range(3):
        scheduler.step()
    assert scheduler.taken[2:] == [("request 3", 1)]
    assert scheduler.flushes == 1 and len(told) == warnings


def test_a_flush_comes_before_a_request_of_the_same_round(one_rank, told):
    scheduler = Scheduler()
    note_changes(runtime(1), scheduler.state)
    scheduler.waiting_queue.append("request")
    scheduler.step()
    assert scheduler.taken == [("request", 1)] and not told


def test_prompts_in_chunks_are_running(one_rank, told):
    scheduler = Scheduler()
    scheduler.chunked_req = Request()
    note_changes(runtime(1), scheduler.state)
    scheduler.step()
    assert scheduler.flushes == 0 and len(told) == 1


def test_requests_do_not_wait_forever(one_rank, told):
    """Something else than a request keeps the scheduler from being idle."""
    scheduler = Scheduler()
    scheduler.busy = True
    note_changes(runtime(1), scheduler.state)
    scheduler.waiting_queue.append("request")
    for _ in range(compensation.MOST_HELD):
        scheduler.step()
    assert scheduler.taken == [] and scheduler.waiting_queue == ["request"]
    scheduler.step()
    assert scheduler.taken == [("request", 0)] and scheduler.state.due


def test_whoever_flushes_makes_up_for_it(one_rank, told):
    scheduler = Scheduler()
    note_changes(runtime(1), scheduler.state)
    hooks.note_flush(False, scheduler)
    assert scheduler.state.due
    hooks.note_flush(True, scheduler)
    scheduler.step()
    assert scheduler.flushes == 0


def test_a_change_on_another_rank_flushes_too(monkeypatch):
    """Lists of experts are each rank's own, radix caches must stay alike."""
    mine, theirs = runtime(0), runtime(1)
    flush = gathering(monkeypatch, theirs)
    note_changes(mine, flush)
    assert flush.due


def test_ranks_that_differ_are_an_error(monkeypatch):
    flush = gathering(monkeypatch, runtime(1, digest="b"))
    with pytest.raises(SelectionsDifferError, match="w13: rank 1 chose other blocks"):
        note_changes(runtime(1), flush)


def gathering(monkeypatch, other):
    """Two ranks, of which the other says this."""

    def gather(found, mine, group):
        found[:] = [mine, other.compensator.state()]

    group = SimpleNamespace(world_size=2, rank_in_group=0, ranks=[0, 1], cpu_group=None)
    monkeypatch.setattr(compensation, "get_tp_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return FlushState()


def test_gauges_of_a_refresh():
    from prometheus_client import REGISTRY

    values = dict.fromkeys(HELP, 1.0) | {"signal_energy": float("nan")}
    metrics.publish([SiteMetrics(name="layer.w13", **values)])
    found = {
        sample.name: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("site") == "layer.w13"
    }
    assert found == {f"sglang:quads_{key}": 1.0 for key in HELP if key != "signal_energy"}


@pytest.mark.parametrize(
    "status, skipped, warming",
    [("Starting", False, True), ("Up", False, False), ("Starting", True, False)],
)
def test_a_server_that_warms_itself_up(monkeypatch, status, skipped, warming):
    import sys

    manager = SimpleNamespace(
        server_args=SimpleNamespace(skip_server_warmup=skipped),
        server_status=SimpleNamespace(name=status),
    )
    server = SimpleNamespace(_global_state=SimpleNamespace(tokenizer_manager=manager))
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", server)
    assert compat.warming_up() == warming
    request = SimpleNamespace(rid=None)
    hooks.name_warm_up(request)
    assert (request.rid is not None) == warming
    named = SimpleNamespace(rid="mine")
    hooks.name_warm_up(named)
    assert named.rid == "mine"


def test_orders_by_name():
    assert actions.is_ours("quads_refresh") and actions.is_ours("quads_load_selection /a b")
    assert not actions.is_ours("checksum") and not actions.is_ours("quads")


@pytest.mark.parametrize("action", ["quads_refresh now", "quads_metrics x y", "quads_forget "])
def test_orders_with_something_behind_their_name_are_refused(one_rank, action):
    """They are ours, so that SGLang does not answer for us, and do nothing."""
    assert actions.is_ours(action)
    with pytest.raises(ValueError, match=f"takes nothing after its name, got '{action}'"):
        actions._call(torch.nn.Module(), action)
