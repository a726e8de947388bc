"""BF16 columns of SGLang's MoE layers lie in memory as the backend reads them; no engine."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quads_common.compensation import serving
from quads_common.options import QuadsOptions
from tests.compensation.serving import check_columns_of_layer, runtime_of
from tests.sglang.engine import CPU_ENVIRONMENT

pytestmark = pytest.mark.sglang


class Experts(nn.Module):
    """What ``QuadsMoEMethod`` asks of a layer: two experts of one rank."""

    moe_ep_rank = moe_tp_rank = num_fused_shared_experts = 0
    moe_tp_size = top_k = 1
    num_experts = 2
    use_presharded_weights = False
    moe_runner_config = SimpleNamespace(
        activation="silu", is_gated=True, swiglu_limit=None, gemm1_alpha=None,
        gemm1_clamp_limit=None, no_combine=False,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["hopper", "emulated"])
def test_columns_lie_in_memory_as_the_weights_do(monkeypatch, backend):
    """Where the backend reads tiled weights columns are tiled, of w13 and of w2 each its way."""
    for name, value in CPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from sglang_quads.fused_moe import QuadsMoEMethod

    monkeypatch.setattr(serving, "moe_backend", lambda *a: (backend, None))
    options, layer = QuadsOptions(method="foursight"), Experts()
    method = QuadsMoEMethod(options, "experts", "auto", backend, runtime_of(options))
    method.create_weights(layer, 2, 256, 128, torch.bfloat16)
    check_columns_of_layer(layer, tiled=backend == "hopper")
