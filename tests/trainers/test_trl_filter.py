"""What ``QuadsGRPOTrainer`` does to TRL's batch, with TRL's own loss; no engine."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL: make test-trainers")

from trl import GRPOConfig, GRPOTrainer

from quads_common.mismatch import FilterOptions
from quads_trainers.trl import QuadsGRPOTrainer

SEQUENCES, GENERATIONS, LENGTH = 40, 2, 6
DRIFTED = [3, 17]


def batch():
    """TRL's output with unequal lengths, two sequences of it drifted."""
    mask = (torch.arange(LENGTH) < 2 + torch.arange(SEQUENCES)[:, None] % 5).long()
    old = torch.full((SEQUENCES, LENGTH), -1.0)
    sampling = old.clone()
    sampling[DRIFTED] -= 1.0
    return {
        "completion_mask": mask,
        "old_per_token_logps": old,
        "sampling_per_token_logps": sampling,
        "advantages": torch.randn(SEQUENCES),
        "importance_sampling_ratio": torch.ones(SEQUENCES, 1),
        "num_items_in_batch": mask.sum(),
    }


def stand_in(loss_type):
    """As much of the trainer as the filter reads."""
    accelerator = SimpleNamespace(
        gather=lambda x: x, process_index=0, is_main_process=True, num_processes=1
    )
    trainer = object.__new__(QuadsGRPOTrainer)
    trainer.__dict__.update(
        accelerator=accelerator,
        num_generations=GENERATIONS,
        loss_type=loss_type,
        _metrics={"train": defaultdict(list)},
    )
    return trainer


def averaged(output, values, loss_type):
    """TRL 1.16's averages over a batch, written as its loss has them."""
    mask = output["completion_mask"]
    weighted = values * output["importance_sampling_ratio"]
    if loss_type == "grpo":
        return ((weighted * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()
    if loss_type == "bnpo":
        return (weighted * mask).sum() / mask.sum().clamp(min=1.0)
    return (weighted * mask).sum() / output["num_items_in_batch"]


@pytest.mark.parametrize("loss_type", ["dapo", "cispo", "grpo", "sapo", "bnpo"])
def test_the_loss_averages_over_what_remains(loss_type):
    """As if the dropped sequences had never been in the batch."""
    output, trainer = batch(), stand_in(loss_type)
    values = torch.randn(SEQUENCES, LENGTH)
    options = FilterOptions(min_group_kept=0)
    trainer._leave_out_drifted(output, options)
    kind = {"cispo": "dapo", "sapo": "grpo"}.get(loss_type, loss_type)
    found = averaged(output, values, kind)
    rest = [i for i in range(SEQUENCES) if i not in DRIFTED]
    clean = {k: v[rest] if v.ndim else v for k, v in batch().items()}
    clean["num_items_in_batch"] = clean["completion_mask"].sum()
    expected = averaged(clean, values[rest], kind)
    # float32 sums in another order
    assert torch.allclose(found.float(), expected, rtol=1e-5, atol=1e-7)
    assert not output["importance_sampling_ratio"][DRIFTED].any()
    assert trainer._metrics["train"]["tim/drop_rate"] == [2 / SEQUENCES]


def test_partners_in_a_group_follow():
    output, trainer = batch(), stand_in("dapo")
    trainer._leave_out_drifted(output, FilterOptions())
    gone = (output["importance_sampling_ratio"] == 0).flatten().nonzero().flatten().tolist()
    assert gone == [2, 3, 16, 17]


def test_tool_tokens_do_not_count():
    output, trainer = batch(), stand_in("dapo")
    output["tool_mask"] = torch.ones_like(output["completion_mask"])
    output["tool_mask"][DRIFTED] = 0  # the drifted tokens came from a tool
    trainer._leave_out_drifted(output, FilterOptions())
    assert trainer._metrics["train"]["tim/drop_rate"] == [0.0]


def test_averages_above_are_trls():
    """They are written down from TRL 1.16; should its loss change, this says so."""
    import inspect

    source = inspect.getsource(GRPOTrainer)
    for line in (
        "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()",
        "loss = (per_token_loss * mask).sum() / mask.sum().clamp(min=1.0)",
        'normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes',
        'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]',
    ):
        assert line in source


@pytest.mark.parametrize(
    ("settings", "ours", "message"),
    [
        ({"use_vllm": False}, {}, "use_vllm=True"),
        ({"loss_type": "vespo"}, {}, "does not support loss_type 'vespo'"),
        ({"vllm_importance_sampling_correction": False}, {}, "importance sampling ratio"),
        ({}, {"qat": False, "check_sync": True}, "needs qat"),
        ({"vllm_tensor_parallel_size": 2}, {"check_sync": True}, "vllm_tensor_parallel_size=1"),
        ({}, {"quads": {"acts": "bf16"}}, "unknown option 'acts'"),
    ],
)
def test_bad_settings_are_named(tmp_path, settings, ours, message):
    config = GRPOConfig(output_dir=str(tmp_path), **({"use_vllm": True, "bf16": False} | settings))
    with pytest.raises(ValueError, match=message):
        QuadsGRPOTrainer(model="x", reward_funcs=len, args=config, **ours)


def test_options_in_two_places_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_QUADS_CONFIG", '{"enable": true}')
    config = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, bf16=False)
    with pytest.raises(ValueError, match="not in both"):
        QuadsGRPOTrainer(model="x", reward_funcs=len, args=config, quads={"act": "bf16"})


def settings_of(tmp_path):
    return GRPOConfig(output_dir=str(tmp_path), use_vllm=True, vllm_mode="colocate", bf16=False)


def test_an_engine_that_is_not_quantized_is_refused(tmp_path, monkeypatch):
    """As with a "model" pattern that does not match what vLLM loads."""

    def initialize(self, *args, **kwargs):
        model_config = SimpleNamespace(quantization=None)
        engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
        self.vllm_generation = SimpleNamespace(llm=SimpleNamespace(llm_engine=engine))

    monkeypatch.setattr(GRPOTrainer, "__init__", initialize)
    for value in (None, '{"enable": true, "model": "*another*"}'):
        if value:
            monkeypatch.setenv("VLLM_QUADS_CONFIG", value)
        with pytest.raises(ValueError, match="quantization=None, expected 'quads_nvfp4'"):
            QuadsGRPOTrainer(model="x", reward_funcs=len, args=settings_of(tmp_path))


def test_a_variable_without_enable_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_QUADS_CONFIG", '{"act": "nvfp4"}')
    with pytest.raises(ValueError, match="the engine would stay BF16"):
        QuadsGRPOTrainer(model="x", reward_funcs=len, args=settings_of(tmp_path))
