"""What depends on the backend before a layer is made: CUDA graphs, and float32 with act bf16."""

from types import SimpleNamespace

import pytest
import torch

from quads_common.activation import Activation
from quads_common.options import QuadsOptions
from tests.vllm.test_options import config
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


@pytest.fixture
def unable(monkeypatch, arith_moe):
    """A method's configuration whose backend cannot compensate, and what it warns of."""
    from vllm_quads import config as module

    warnings = []
    monkeypatch.setattr(module, "can_compensate", lambda backend: False)
    monkeypatch.setattr(module.logger, "warning_once", lambda *a: warnings.append(a[0] % a[1:]))
    return lambda options: (config(arith_moe, additional_config={"quads": options}), warnings)


def test_the_default_method_on_a_backend_that_cannot(unable):
    """Plain NVFP4, with a WARNING that names what was wanted and what is served."""
    vllm_config, warnings = unable({})
    assert vllm_config.quant_config.options.preset == "nvfp4"
    assert len(warnings) == 1
    assert "default method 'quads' is not available on backend 'emulated'" in warnings[0]
    assert "serving method 'nvfp4'" in warnings[0]
    _, warnings = unable({"method": "nvfp4"})
    assert len(warnings) == 1


@pytest.mark.parametrize(
    "options",
    [{"method": "quads"}, {"method": "foursight"}, {"rac_ratio": 0.25}, {"selection_file": "x"}],
    ids=["quads", "foursight", "knob", "file"],
)
def test_what_was_asked_for_is_refused(unable, options):
    with pytest.raises(ValueError, match=r"is not available on backend 'emulated'.*: use method"):
        unable(options)


def test_hopper_layers_with_bf16_columns(monkeypatch):
    """What the kernels are compiled for: this rank's counts."""
    from vllm_quads import fused_moe

    calls = []
    monkeypatch.setattr(fused_moe, "moe_backend", lambda *a: calls.append(a) or ("hopper", None))
    method = SimpleNamespace(
        options=QuadsOptions(method="foursight"),
        runtime=object(), backend="hopper", activation=Activation(),
        moe=SimpleNamespace(moe_parallel_config=SimpleNamespace(tp_size=4)),
    )  # fmt: skip
    assert fused_moe.QuadsMoEMethod._choose_backend(method, 128, 2048, 192)
    assert calls[0][6:] == (False, True, (64, 16))
