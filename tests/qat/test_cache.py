"""``cached_quantization``: fewer quantizations, never a stale one."""

import gc
import weakref

import pytest
import torch
from torch import nn

from quads_common.qat import cached_quantization, prepare_qat
from quads_common.qat import weight as weight_module
from tests.common.bits import assert_same_bits
from tests.qat import tiny_models


@pytest.fixture
def calls(monkeypatch):
    """How often a weight was quantized."""
    count = []
    original = weight_module.effective_weight

    def counted(*args, **kwargs):
        count.append(args)
        return original(*args, **kwargs)

    monkeypatch.setattr(weight_module, "effective_weight", counted)
    return count


def logits(model):
    return model(input_ids=tiny_models.tokens(), use_cache=False).logits


def assert_fresh(model, before):
    """The cached forward equals one without cache, and differs from ``before``."""
    cached = logits(model).detach()
    for weight in weight_module.prepared_weights(model):
        assert weight.caching
        weight.caching = False
    fresh = logits(model).detach()
    for weight in weight_module.prepared_weights(model):
        weight.caching = True
    assert_same_bits(cached, fresh, "cached")
    assert not torch.equal(cached, before)


@pytest.mark.parametrize("build", [tiny_models.moe, tiny_models.dense], ids=["moe", "dense"])
def test_quantizes_once_in_the_block_and_anew_after_it(build, calls):
    model = prepare_qat(build())
    weights = len(weight_module.prepared_weights(model))
    expected = logits(model).detach()
    calls.clear()
    with cached_quantization(model):
        for _ in range(3):
            assert_same_bits(logits(model).detach(), expected, "logits")
    assert len(calls) == weights
    logits(model)
    assert len(calls) == 2 * weights
    assert all(weight.kept is None for weight in weight_module.prepared_weights(model))


def test_gradients_accumulate_as_without_it():
    model = prepare_qat(tiny_models.moe())
    gradients = []
    for cached in (False, True):
        model.zero_grad()
        with cached_quantization(model) if cached else torch.enable_grad():
            for _ in range(2):
                logits(model).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, cached in zip(*gradients, strict=True):
        assert_same_bits(cached, plain, "gradient")


def step(model, optimizer_class=torch.optim.AdamW, **options):
    optimizer_class(model.parameters(), lr=0.05, **options).step()


@torch.no_grad()
def in_place(model):
    model.model.layers[0].mlp.experts.down_proj[0, 0, 0] += 10.0


class UntracedOptimizer(torch.optim.Optimizer):
    """Writes as fused kernels from outside torch do: no version counter moves."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.mul_(0.7)


CHANGES = {
    "adamw": step,
    "adamw foreach": lambda model: step(model, foreach=True),
    "adamw fused": lambda model: step(model, fused=True),
    "untraced optimizer": lambda model: step(model, UntracedOptimizer),
    "in place": in_place,
    "load": lambda model: model.load_state_dict(tiny_models.moe(seed=9).state_dict()),
    "assign": lambda model: model.load_state_dict(
        tiny_models.moe(seed=9).state_dict(), assign=True
    ),
    "data": lambda model: [
        setattr(p, "data", 0.5 * p.data) for p in tiny_models.expert_stacks(model)
    ],
    "dtype": lambda model: model.to(torch.float32),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_quantized_anew(change):
    model = prepare_qat(tiny_models.moe())
    with cached_quantization(model):
        output = logits(model)
        output.square().sum().backward()
        CHANGES[change](model)
        assert_fresh(model, output.detach())


@pytest.mark.parametrize("new", ["parameter", "data"])
def test_what_is_kept_holds_its_sources(new):
    """So no new parameter can have the identity or the address of an old one."""
    model = prepare_qat(tiny_models.dense())
    (weight, *_) = weight_module.prepared_weights(model)
    with cached_quantization(model):
        logits(model)
        old = weakref.ref(weight.owner.weight.untyped_storage())
        address = weight.owner.weight.data_ptr()
        if new == "parameter":
            weight.owner.weight = nn.Parameter(weight.owner.weight.detach() * 2)
        else:
            weight.owner.weight.data = weight.owner.weight.data * 2
        gc.collect()
        assert old() is not None and weight.owner.weight.data_ptr() != address
        logits(model)
        gc.collect()
        assert old() is None


def test_inference_mode_keeps_nothing_that_training_would_use():
    model = prepare_qat(tiny_models.moe())
    with cached_quantization(model):
        with torch.inference_mode():
            expected = logits(model)
        output = logits(model)
        output.sum().backward()
    assert_same_bits(output.detach(), expected.clone(), "logits")


def test_a_change_of_a_sibling_counts():
    """A larger q makes k's and v's scale another."""
    model = prepare_qat(tiny_models.dense())
    attention = model.model.layers[0].self_attn
    with cached_quantization(model):
        before = attention.k_proj(torch.eye(64, dtype=torch.bfloat16)).detach()
        with torch.no_grad():
            attention.q_proj.weight[0, 0] = 3.0e5
        after = attention.k_proj(torch.eye(64, dtype=torch.bfloat16)).detach()
    assert not torch.equal(before, after)
    assert_same_bits(after, attention.k_proj(torch.eye(64, dtype=torch.bfloat16)), "k_proj")


def test_autocast_does_not_reuse_another_dtype():
    model = prepare_qat(tiny_models.dense(torch.float32))
    with cached_quantization(model):
        with torch.autocast("cpu", torch.bfloat16):
            first = logits(model).detach()
        wide = logits(model).detach()
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(logits(model).detach(), first, "autocast")
    assert_same_bits(wide, logits(model).detach(), "float32")


def test_refused_without_preparation():
    with pytest.raises(ValueError, match="not prepared"), cached_quantization(nn.Linear(16, 16)):
        pass


def test_is_off_after_an_error():
    model = prepare_qat(tiny_models.moe())
    with pytest.raises(KeyError), cached_quantization(model):
        raise KeyError
    assert not any(weight.caching for weight in weight_module.prepared_weights(model))
