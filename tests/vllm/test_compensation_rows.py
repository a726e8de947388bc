"""Which rows count, and small parts of compensation that need no engine."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

from quads_common.options import QuadsOptions
from quads_common.placement import ModelFacts
from vllm_quads import compensation
from vllm_quads.compensation import rows_unknown
from vllm_quads.loading import finish_loading, load_themselves
from vllm_quads.metrics import MetricsFile
from vllm_quads.prefix_cache import SelectionsDifferError, reset_if_changed, retry_reset
from vllm_quads.sync import quads_end_sync

EXPERTS, DENSE = ModelFacts(True, 4), ModelFacts(False, 4)


def vllm_config(**parallel):
    """What the plugin looks at."""
    defaults = {
        "data_parallel_size": 1,
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**defaults, **parallel}),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32),
    )


@pytest.mark.parametrize(
    "parallel, facts, reason",
    [
        ({}, EXPERTS, None),
        ({"data_parallel_size": 2}, EXPERTS, "data parallel experts"),
        ({"data_parallel_size": 2}, DENSE, None),
        ({"prefill_context_parallel_size": 2}, DENSE, "prefill context parallelism"),
        ({"enable_dbo": True}, EXPERTS, "micro-batches"),
        ({"distributed_executor_backend": "ray"}, EXPERTS, "the Ray executor"),
    ],
    ids=["one engine", "DP experts", "DP dense", "PCP", "DBO", "Ray"],
)
def test_where_rows_are_not_known(parallel, facts, reason):
    found = rows_unknown(vllm_config(**parallel), facts)
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize("data_parallel, warnings", [(1, 0), (2, 2)])
def test_statistics_that_stay_off_are_told(monkeypatch, tmp_path, data_parallel, warnings):
    told = []
    monkeypatch.setattr(compensation, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(compensation.logger, "warning", lambda *args: told.append(args))
    config = vllm_config(data_parallel_size=data_parallel)
    metrics = MetricsFile("test")
    runtime = compensation.new_runtime(QuadsOptions(), config, EXPERTS, metrics)
    assert len(told) == warnings
    assert runtime.period == (64 if data_parallel == 1 else 0)
    assert runtime.places == (2 if data_parallel == 1 else 0)
    assert runtime.compensator.count_staged == runtime.count_staged
    runtime.sample_map(torch.device("cpu"))
    sampled = [runtime.begin(32) for _ in range(4)]
    assert sum(sampled) == (2 if data_parallel == 1 else 0), "one token of each 64"


class Core:
    """An engine core whose workers answer with ``states``; ``running`` requests hold its cache."""

    def __init__(self, *states, cached=True):
        self.states = states
        self.resets = 0
        self.model_executor = self.scheduler = self
        self.running = []
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=cached)
        )

    def collective_rpc(self, method):
        assert method == "quads_selection_state"
        return list(self.states)

    def reset(self):
        self.resets += 1
        return not self.running

    def check(self):
        reset_if_changed(self, Core.reset)

    def step(self):
        retry_reset(self, Core.reset)


def state(version, digest="a", start=0):
    return {"version": version, "start_version": start, "shared": {"w13": digest}}


@pytest.fixture
def told(monkeypatch):
    """Warnings about the prefix cache."""
    found = []
    warn = "vllm_quads.prefix_cache.logger.warning"
    monkeypatch.setattr(warn, lambda text, *args: found.append(text))
    return found


def test_the_prefix_cache_is_reset_once_for_each_change(told):
    core = Core(state(1, start=1), state(1, start=1))
    core.check()
    assert core.resets == 0, "a selection file at the start is no change"
    for states, resets in (((2, 2), 1), ((2, 2), 1), ((2, 3), 2)):
        core.states = [state(v, start=1) for v in states]
        core.check()
        core.step()
        assert core.resets == resets
    assert not told


def test_a_reset_waits_for_running_requests(told):
    core = Core(state(1))
    core.running = ["request"]
    for _ in range(3):
        core.check()
        core.step()
    assert core.resets == len(told) == 1, "one attempt, one warning"
    assert "until none runs" in told[0]
    core.states = [state(2)]
    core.check()
    assert core.resets == len(told) == 2, "another change"
    core.running = []
    core.step()
    assert core.resets == 3, "nobody runs: the step resets before it schedules"
    core.step()
    core.check()
    assert core.resets == 3 and len(told) == 2


def test_an_rpc_makes_up_for_a_reset_too(told):
    core = Core(state(1))
    core.running = ["request"]
    core.check()
    core.running = []
    core.check()
    core.step()
    assert core.resets == 2


def test_without_a_prefix_cache_nothing_is_told(told):
    core = Core(state(1), cached=False)
    core.running = ["request"]
    core.check()
    assert core.resets == 1 and not told


class Scheduler:
    """Resets only with the flag, as while a request runs."""

    def __init__(self):
        self.running, self.calls = ["request"], []

    def reset_prefix_cache(self, running=False, connector=False):
        self.calls.append(running)
        return running


class Workers:
    """Their lists change in each of ``changing``."""

    def __init__(self, *changing):
        self.version, self.changing = 0, changing

    def collective_rpc(self, method, *args):
        if method == "quads_selection_state":
            return [state(self.version)]
        self.version += method in self.changing
        if method == "failing":
            raise ValueError("after the lists changed")
        return [None]


def patched_core(*changing):
    """vLLM's own class with our patches, without an engine."""
    from vllm.v1.engine.core import EngineCore

    from vllm_quads.patches import apply

    apply()
    core = EngineCore.__new__(EngineCore)
    core.model_executor, core.scheduler = Workers(*changing), Scheduler()
    core.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(quantization="quads_nvfp4"),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )
    return core


def test_the_flag_of_a_reset_reaches_it_and_nothing_is_told(told):
    core = patched_core("quads_end_sync")
    assert core.reset_prefix_cache(True)
    assert core.scheduler.calls == [True] and not told
    core = patched_core("quads_end_sync")
    assert not core.reset_prefix_cache()
    assert core.scheduler.calls == [False] and len(told) == 1


def test_lists_that_changed_before_an_error_reset_the_cache(told):
    core = patched_core("failing")
    with pytest.raises(ValueError, match="after the lists changed"):
        core.collective_rpc("failing")
    assert core.scheduler.calls == [False] and len(told) == 1


def test_steps_reset_what_waits(told):
    core = patched_core("quads_refresh")
    core.collective_rpc("quads_refresh")
    core.scheduler.has_requests = lambda: False
    core.step()
    assert core.scheduler.calls == [False]
    core.scheduler.running = []
    core.step()
    assert core.scheduler.calls == [False, False]


def test_an_engine_that_compensates_nothing_resets_nothing():
    core = Core(None, None)
    core.check()
    assert core.resets == 0


def test_ranks_that_differ_are_an_error():
    with pytest.raises(SelectionsDifferError, match="w13: rank 1 chose other blocks"):
        Core(state(1), state(1, "b")).check()


def test_metrics_that_cannot_be_written_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    file = MetricsFile("test")
    file.path.mkdir()  # nothing can take its place
    with pytest.raises(OSError):
        file.write([])
    assert list(tmp_path.iterdir()) == [file.path]


class Refused:
    """Units of which some hold NaN."""

    name = "w"

    def drop_open(self):
        raise ValueError("w: NaN or Inf")


def test_a_refused_weight_does_not_keep_a_sync_open(monkeypatch):
    """Every boundary tells the error, and the lists are dealt with all the same."""
    layer, ended = torch.nn.Module(), []
    load_themselves(layer, [Refused()], lambda: ended.append("vLLM's reload"))
    with pytest.raises(ValueError, match="NaN or Inf"):
        LAYERWISE_INFO[layer].can_load()
    with pytest.raises(ValueError, match="NaN or Inf"):
        finish_loading(layer, "auto", lambda: ended.append("finish"))
    runtime = SimpleNamespace(
        compensator=SimpleNamespace(end_sync=lambda: ended.append("quads_end_sync"))
    )
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(get_model=lambda: layer),
        vllm_config=SimpleNamespace(quant_config=SimpleNamespace(runtime=runtime)),
    )
    with pytest.raises(ValueError, match="NaN or Inf"):
        quads_end_sync(worker)
    assert ended == ["vLLM's reload", "finish", "quads_end_sync"]
