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
    flush_if_idle,
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


class Scheduler:
    """A scheduler with a radix cache; busy while ``running``."""

    def __init__(self, disable_radix_cache=False):
        self.running, self.flushes, self.state = False, 0, FlushState()
        self.server_args = SimpleNamespace(disable_radix_cache=disable_radix_cache)
        model = SimpleNamespace(quads_config=SimpleNamespace(flush=self.state, runtime=object()))
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))

    def is_fully_idle(self):
        return not self.running

    def flush_cache(self):
        self.flushes += 1
        hooks.note_flush(not self.running, self)

    def step(self):
        flush_if_idle(self, self.state)


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
    scheduler = Scheduler(disabled)
    scheduler.running = True
    for version in (1, 2):
        note_changes(runtime(version), scheduler.state)
        for _ in range(compensation.PATIENCE - 1):
            scheduler.step()
        assert len(told) == warnings * (version - 1) // 2, "it may be about to end"
        for _ in range(3):
            scheduler.step()
    assert scheduler.flushes == 0 and len(told) == warnings
    scheduler.running = False
    calls = []

    def requests_come_in(_):
        calls.append(scheduler.flushes)
        scheduler.running = True

    hooks.flush_changed(requests_come_in, scheduler)
    assert calls == [1], "before anything is looked up in the cache again"
    scheduler.step()
    assert scheduler.flushes == 1


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
