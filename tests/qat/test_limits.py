"""Models that QAT refuses by name, and copies of prepared models."""

import copy
import io

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from quads_common.qat import cached_quantization, fingerprints, prepare_qat
from quads_common.qat.effective import check_amax
from quads_common.qat.weight import prepared_weights
from tests.qat import tiny_models

IDS = torch.tensor([[1, 2, 3, 4]])


def test_renamed_models_are_refused():
    """transformers calls Mixtral's block ``mlp``, its checkpoints ``block_sparse_moe``."""
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    with pytest.raises(
        NotImplementedError, match=r"'mixtral' have other names than its checkpoint"
    ):
        prepare_qat(MixtralForCausalLM(config))


def test_base_models_are_refused():
    model = tiny_models.moe(torch.float32)
    with pytest.raises(NotImplementedError, match=r"'layers\.0\.mlp\.experts' is not a checkpoint"):
        prepare_qat(model.model)
    prepare_qat(model)


def test_linears_of_a_mamba_mixer_are_refused():
    mixer = nn.Module()
    mixer.out_proj = nn.Linear(32, 32)
    mixer.A_log = nn.Parameter(torch.zeros(4))
    model = nn.Module()
    model.mixer = mixer
    with pytest.raises(
        NotImplementedError, match=r"mixer\.out_proj: Module hands its linears' raw"
    ):
        prepare_qat(model, {"targets": "linear"})


def test_targets_that_match_nothing_are_refused():
    with pytest.raises(ValueError, match="targets: 'q_porj' matches no module"):
        prepare_qat(tiny_models.moe(torch.float32), {"targets": ["auto", "q_porj"]})


def test_a_prepared_model_survives_pickling():
    model = prepare_qat(tiny_models.moe(torch.float32))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert fingerprints(again) == fingerprints(model)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert all(w.owner in set(again.modules()) for w in prepared_weights(again))


def test_a_copy_made_while_caching_does_not_cache():
    model = prepare_qat(tiny_models.moe(torch.float32))
    with cached_quantization(model):
        model(IDS)
        other = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1, fused=True)
    other(IDS, labels=IDS).loss.backward()
    optimizer.step()
    fresh = prepare_qat(tiny_models.moe(torch.float32))
    fresh.load_state_dict(other.state_dict())
    assert torch.equal(other(IDS).logits, fresh(IDS).logits)


def test_bad_weights_are_noticed_in_every_cached_forward():
    model = prepare_qat(tiny_models.moe(torch.float32))
    weight = prepared_weights(model)[0].parameter()
    with torch.no_grad():
        weight[0, 0, 0] = float("nan")
    with cached_quantization(model):
        for _ in range(2):
            with pytest.raises(ValueError, match="NaN or Inf"):
                model(IDS)


def test_maxima_may_lie_on_several_devices(monkeypatch):
    """Only tensors of one device are put together; a second one is imitated."""
    seen = []
    plain = torch.cat
    monkeypatch.setattr(torch, "cat", lambda tensors: seen.append(len(tensors)) or plain(tensors))

    class Elsewhere(torch.Tensor):
        device = torch.device("cuda:1")

    there = torch.ones(2).as_subclass(Elsewhere)
    check_amax([torch.ones(3), there], ["here", "there"])
    assert sorted(seen) == [1, 1]
