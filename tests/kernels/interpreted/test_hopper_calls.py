"""What the layers hand to the CUDA C++ kernels passes the checks; Triton's part is interpreted."""

import pytest
import torch

from quads_common.kernels import hopper
from quads_common.kernels.compensated import fused_moe_compensated_hopper
from quads_common.kernels.hopper import DecodePlan
from quads_common.kernels.hopper_arguments import moe_arguments
from quads_common.kernels.moe import fused_moe_hopper
from tests.kernels.compare_hopper_compensated import lists_of
from tests.kernels.compensated_cases import Preset
from tests.kernels.exact import random_rows, random_weight
from tests.kernels.staged import new_gathering

TOKENS, TOP_K, EXPERTS, HIDDEN, INNER = 5, 2, 4, 384, 128

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture
def handed(monkeypatch):
    """The structures that the kernels would get, with a GPU of 132 multiprocessors."""
    found = []

    def decode_experts(operand, w13, w2, routes, router, plan, limit, inspection=None, **rest):
        out = torch.zeros((TOKENS * TOP_K, HIDDEN))
        found.append(
            moe_arguments(
                operand, w13, w2, routes, router, rows=plan.rows, spread=0, limit=limit, out=out,
                product=None, inspection=inspection, **rest,
            )
        )  # fmt: skip
        return out

    monkeypatch.setattr(hopper, "processors", lambda device: 132)
    monkeypatch.setattr(hopper, "decode_experts", decode_experts)
    # Not "few", for which the quantizer has instructions that the interpreter has not.
    monkeypatch.setattr(hopper, "decode_plan", lambda *sizes: DecodePlan("pair", 32))
    return found


def layer():
    generator = torch.Generator().manual_seed(5)
    w13 = random_weight(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    w2 = random_weight(EXPERTS, HIDDEN, INNER, generator=generator)
    x = random_rows(TOKENS, HIDDEN, generator=generator)
    ids = torch.randint(0, 2 * EXPERTS, (TOP_K, TOKENS), generator=generator).T  # not contiguous
    return x, w13, w2, torch.rand((TOKENS, TOP_K), dtype=torch.float64), ids


@pytest.mark.parametrize("act", ["nvfp4", "bf16"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
def test_plain_layers(handed, act, ids):
    x, w13, w2, router, chosen = layer()
    mapping = torch.arange(2 * EXPERTS, dtype=torch.int32) - EXPERTS
    fused_moe_hopper(x, w13, w2, router, chosen.to(ids), act=act, expert_map=mapping)
    (arguments,) = handed
    assert (arguments.row_scale is None) == (act == "bf16")
    assert (arguments.routes.wide, arguments.routes.map_size) == (ids == torch.int64, 8)


PRESETS = {
    "nothing": Preset(),
    "rac": Preset(0.5, alpha=0.5),
    "splice": Preset(channels=20),
    "splice rac": Preset(0.5, 32),
    "columns": Preset(channels=32, columns=True),
    "columns rac": Preset(0.5, 16, True),
}


@pytest.mark.parametrize("name", PRESETS)
def test_compensated_layers(handed, name):
    x, w13, w2, router, ids = layer()
    presets = (PRESETS[name], PRESETS[name])
    inputs = lists_of(presets, HIDDEN, INNER, EXPERTS, "cpu")
    gathering = new_gathering(TOKENS, TOP_K, (HIDDEN, INNER), x.dtype, "cpu")
    fused_moe_compensated_hopper(
        x, w13, w2, router, ids % EXPERTS, w13_input=inputs[0], w2_input=inputs[1],
        gathering=gathering,
    )  # fmt: skip
    (arguments,) = handed
    assert arguments.staged_rows == gathering.w2.rows.data_ptr()
    assert (arguments.compensation.hot_bits is None) == (inputs[1].channels is None)
    assert (arguments.columns.w13 is None) == (inputs[0].columns is None)
