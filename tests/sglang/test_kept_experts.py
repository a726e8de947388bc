"""Experts that stay BF16: stacks come to the model one expert after the other."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from torch import nn

from sglang_quads.loading import Watch

pytestmark = pytest.mark.sglang

EXPERTS = "model.layers.0.mlp.experts"


class Kept(FusedMoE):
    """Experts of SGLang's without its parameters."""

    def __init__(self, experts):
        nn.Module.__init__(self)
        self.num_experts = experts


@pytest.fixture
def watch():
    """Of a model with three experts that stay as they are."""
    model = nn.Module()
    model.model = nn.Module()
    model.model.layers = nn.ModuleList([nn.Module()])
    layer = model.model.layers[0]
    layer.mlp, layer.o_proj = nn.Module(), nn.Linear(2, 2)
    layer.mlp.experts = Kept(3)
    layer.o_proj.quads_units, layer.o_proj.quads_serving = (), False
    model.config = SimpleNamespace(num_hidden_layers=1)
    model.quads_config = SimpleNamespace(seen=set())
    return Watch(model)


def load(watch, *weights):
    """What reaches the model's own function."""
    found = {}
    watch.load(lambda items: found.update(items), weights)
    return found


def test_stacks_are_taken_apart(watch):
    up = torch.arange(24.0).reshape(3, 4, 2)
    down = torch.arange(12.0).reshape(3, 2, 2)
    found = load(watch, (f"{EXPERTS}.gate_up_proj", up), (f"{EXPERTS}.down_proj.weight", down))
    assert len(found) == 9
    for i in range(3):
        assert torch.equal(found[f"{EXPERTS}.{i}.gate_proj.weight"], up[i, :2])
        assert torch.equal(found[f"{EXPERTS}.{i}.up_proj.weight"], up[i, 2:])
        assert torch.equal(found[f"{EXPERTS}.{i}.down_proj.weight"], down[i])


@pytest.mark.parametrize("shape", [(2, 4, 2), (4, 2)])
def test_stacks_of_other_experts(watch, shape):
    with pytest.raises(ValueError, match=rf"{EXPERTS}\.down_proj: expected 3 experts"):
        load(watch, (f"{EXPERTS}.down_proj", torch.zeros(shape)))


def test_models_with_other_names(watch):
    """Split names would be passed over."""
    load(watch, (f"{EXPERTS}.0.w1.weight", torch.zeros(2, 2)))
    watch.names.quantized[0].quads_serving = True
    with pytest.raises(ValueError, match="down_proj: send the experts of this model one by one"):
        load(watch, (f"{EXPERTS}.down_proj", torch.zeros(3, 2, 2)))


def test_experts_that_are_not_there(watch):
    watch.names.quantized[0].quads_serving = True
    with pytest.raises(ValueError, match=r"no quantized layer .*experts\.3\.up_proj"):
        load(watch, (f"{EXPERTS}.3.up_proj.weight", torch.zeros(2, 2)))


def test_errors_of_the_model_name_what_it_got(watch):
    def strict(items):
        for _ in items:
            raise AssertionError("wrong shape")

    with pytest.raises(AssertionError, match=r"^wrong shape \(the model got norm\.weight last\)$"):
        watch.load(strict, [("norm.weight", torch.zeros(2))])


def test_errors_that_name_it_stay(watch):
    def strict(items):
        for name, _ in items:
            raise KeyError(name)

    with pytest.raises(KeyError, match=r"^'norm\.weight'$"):
        watch.load(strict, [("norm.weight", torch.zeros(2))])
