"""Which rows count, and small parts of compensation that need no engine."""

from types import SimpleNamespace

import pytest
import torch

from quads_common.options import QuadsOptions
from quads_common.placement import ModelFacts
from vllm_quads import compensation
from vllm_quads.calibrate import read_prompts
from vllm_quads.compensation import rows_unknown
from vllm_quads.metrics import MetricsFile
from vllm_quads.prefix_cache import SelectionsDifferError, reset_if_changed

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
    """An engine core whose workers answer with ``states``."""

    def __init__(self, *states):
        self.states = states
        self.resets = 0
        self.model_executor = self

    def collective_rpc(self, method):
        assert method == "quads_selection_state"
        return list(self.states)

    def reset(self):
        self.resets += 1
        return self.resets < 3

    def check(self):
        reset_if_changed(self, lambda core: core.reset())


def state(version, digest="a", start=0):
    return {"version": version, "start_version": start, "shared": {"w13": digest}}


def test_the_prefix_cache_is_reset_once_for_each_change(monkeypatch):
    told = []
    monkeypatch.setattr("vllm_quads.prefix_cache.logger.warning", lambda *args: told.append(args))
    core = Core(state(1, start=1), state(1, start=1))
    core.check()
    assert core.resets == 0, "a selection file at the start is no change"
    for states, resets in (((2, 2), 1), ((2, 2), 1), ((2, 3), 2)):
        core.states = [state(v, start=1) for v in states]
        core.check()
        assert core.resets == resets
    assert not told
    core.states = [state(4, start=1), state(4, start=1)]
    core.check()
    assert len(told) == 1, "the reset failed because requests run"


def test_an_engine_that_compensates_nothing_resets_nothing():
    core = Core(None, None)
    core.check()
    assert core.resets == 0


def test_ranks_that_differ_are_an_error():
    with pytest.raises(SelectionsDifferError, match="w13: rank 1 chose other blocks"):
        Core(state(1), state(1, "b")).check()


def test_prompts_of_a_file(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n")
    lines.write_text('{"prompt": "one"}\n{"prompt": "two", "answer": 1}\n')
    assert read_prompts(text) == read_prompts(lines) == ["one", "two"]
    lines.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(ValueError, match='line 2 has no "prompt"'):
        read_prompts(lines)
    text.write_text("\n")
    with pytest.raises(ValueError, match="holds no prompt"):
        read_prompts(text)
