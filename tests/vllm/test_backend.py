"""What depends on the backend before a layer is made: CUDA graphs, and float32 with act bf16."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quads_common.activation import Activation
from quads_common.compensation import serving
from quads_common.options import QuadsOptions
from tests.compensation.serving import check_columns_of_layer, runtime_of
from tests.vllm.test_options import config
from vllm_quads.fused_moe import QuadsMoEMethod
from vllm_quads.refusals import check_supported


@pytest.fixture
def on_cuda(arith_moe):
    """A configuration of a CUDA GPU with CUDA graphs on."""
    vllm_config = config(arith_moe)
    vllm_config.device_config = SimpleNamespace(device_type="cuda")
    vllm_config.model_config.enforce_eager = False
    return vllm_config


def test_cuda_graphs_need_a_backend_that_can(on_cuda):
    check_supported(on_cuda, "triton", "nvfp4")
    with pytest.raises(ValueError, match=r"CUDA graphs .*emulated.*: add --enforce-eager"):
        check_supported(on_cuda, "emulated", "nvfp4")
    on_cuda.model_config.enforce_eager = True
    check_supported(on_cuda, "emulated", "nvfp4")


def test_float32_activations_have_no_16_bit_operand(on_cuda):
    check_supported(on_cuda, "triton", "bf16")
    on_cuda.model_config.dtype = torch.float32
    check_supported(on_cuda, "triton", "nvfp4")
    with pytest.raises(ValueError, match=r"float32 with act bf16 .*backend triton"):
        check_supported(on_cuda, "triton", "bf16")


def test_hopper_layers_with_bf16_columns(monkeypatch):
    """What the kernels are compiled for: this rank's counts."""
    calls = []
    monkeypatch.setattr(serving, "moe_backend", lambda *a: calls.append(a) or ("hopper", None))
    method = SimpleNamespace(
        options=QuadsOptions(method="foursight"),
        runtime=object(), backend="hopper", activation=Activation(),
        moe=SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=4)),
    )  # fmt: skip
    assert QuadsMoEMethod._choose_backend(method, 128, 2048, 192)
    assert calls[0][6:] == (False, True, (64, 16))


class Experts(nn.Module):
    """What ``QuadsMoEMethod`` asks of a layer: two experts of one rank."""

    def __init__(self):
        super().__init__()
        parallel = SimpleNamespace(tp_size=1, tp_rank=0)
        self.moe_config = SimpleNamespace(
            moe_parallel_config=parallel, num_experts=2, experts_per_token=1, has_bias=False
        )
        self.activation, self.expert_map = SimpleNamespace(value="silu"), None
        self.load_weights = None


@pytest.mark.parametrize("backend", ["hopper", "emulated"])
def test_columns_lie_in_memory_as_the_weights_do(monkeypatch, backend):
    """Where the backend reads tiled weights columns are tiled, of w13 and of w2 each its way."""
    monkeypatch.setattr(serving, "moe_backend", lambda *a: (backend, None))
    options, layer = QuadsOptions(method="foursight"), Experts()
    method = QuadsMoEMethod(options, layer, "experts", "auto", backend, runtime_of(options))
    method.create_weights(layer, 2, 256, 128, torch.bfloat16)
    check_columns_of_layer(layer, tiled=backend == "hopper")
