"""A prepared model computes what the same model with decoded weights computes, bit for bit."""

import copy

import pytest
import torch

from quads_common import dequantize, fake_quantize
from quads_common.qat import fingerprints, prepare_qat
from quads_common.qat.weight import prepared_weights
from quads_common.weight_units import WeightUnits
from tests.common.bits import assert_same_bits
from tests.qat import tiny_models
from tests.qat.tiny_models import REPLACED

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def run(model):
    """Logits, and the gradient of every parameter, on the CPU."""
    batch = tiny_models.tokens().to(model.device)
    output = model(input_ids=batch, labels=batch, use_cache=False)
    output.loss.backward()
    return output.logits.detach().cpu(), {n: p.grad.cpu() for n, p in model.named_parameters()}


def assert_same_run(prepared, replaced, what):
    """Same logits; same gradients: straight through is d effective = d weight."""
    (logits, gradients), (expected_logits, expected_gradients) = run(prepared), run(replaced)
    assert_same_bits(logits, expected_logits, f"{what} logits")
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_same_bits(gradient, expected_gradients[name], f"{what} gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", REPLACED)
def test_prepared_model_equals_decoded_weights(kind, dtype):
    build, replace = REPLACED[kind]
    model = build(DTYPES[dtype])
    replaced = replace(model)
    plain = run(copy.deepcopy(model))[0]
    assert_same_run(prepare_qat(model), replaced, f"{kind} {dtype}")
    assert not torch.equal(plain, run(replaced)[0]), "quantization changes nothing here"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("moe", "bf16"), ("gpt_oss", "bf16"), ("dense", "bf16"), ("dense", "fp32")],
)
def test_prepared_model_equals_decoded_weights_on_this_gpu(kind, dtype):
    """The reference decodes on the CPU."""
    build, replace = REPLACED[kind]
    model = build(DTYPES[dtype])
    replaced = replace(model).cuda()
    got, expected = run(prepare_qat(model).cuda()), run(replaced)
    assert_same_bits(got[0], expected[0], "logits")
    weights = [weight.parameter_name for weight in prepared_weights(model)]
    for name in weights:
        assert_same_bits(got[1][name], expected[1][name], f"gradient of {name}")
    assert fingerprints(model) == fingerprints(model.cpu())


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_rule_te_equals_decoded_weights(kind):
    build, replace = REPLACED[kind]
    model = build()
    replaced = replace(model, global_scale_rule="te")
    other_rule = run(replace(model))[0]
    assert_same_run(prepare_qat(model, {"global_scale_rule": "te"}), replaced, kind)
    assert not torch.equal(other_rule, run(replaced)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", ["moe", "gpt_oss"])
def test_every_experts_implementation_sees_the_effective_weights(kind, implementation):
    """Also one that is selected after ``prepare_qat``, as ``generate`` does."""
    build, replace = REPLACED[kind]
    model = build()
    replaced = replace(model)
    prepare_qat(model)
    for each in (model, replaced):
        each.set_experts_implementation(implementation)
    assert_same_run(model, replaced, implementation)


def test_generate_uses_the_effective_weights():
    model = tiny_models.moe()
    replaced = tiny_models.with_decoded_experts(model)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    options["return_dict_in_generate"] = True
    got = prepare_qat(model).generate(tiny_models.tokens(), **options)
    expected = replaced.generate(tiny_models.tokens(), **options)
    assert_same_bits(torch.stack(got.logits), torch.stack(expected.logits), "logits")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_autocast_equals_decoded_weights(kind, dtype):
    """FP32 masters: a linear's weight is decoded to the autocast dtype at once."""
    build, replace = REPLACED[kind]
    model = build(torch.float32)
    replaced = replace(model)
    prepare_qat(model)
    with torch.autocast("cpu", getattr(torch, dtype)):
        assert_same_run(model, replaced, dtype)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_gradient_checkpointing_changes_nothing(kind):
    build, replace = REPLACED[kind]
    model = build()
    replaced = replace(model)
    prepare_qat(model).gradient_checkpointing_enable()
    model.train()
    assert_same_run(model, replaced.train(), kind)


def test_gradients_accumulate():
    model = tiny_models.moe()
    replaced = tiny_models.with_decoded_experts(model)
    prepare_qat(model)
    for each in (model, replaced):
        run(each)
    assert_same_run(model, replaced, "second backward")


class Block(torch.nn.Module):
    """Stacked experts (batched_mm compiles for every dtype) and a dense MLP."""

    def __init__(self, dtype):
        super().__init__()
        model = tiny_models.moe(dtype)
        model.set_experts_implementation("batched_mm")
        self.experts = model.model.layers[0].mlp.experts
        self.mlp = tiny_models.dense(dtype).model.layers[0].mlp

    def forward(self, x, chosen, shares):
        return self.mlp(self.experts(x, chosen, shares))


@torch.no_grad()
def decode_block(block):
    """A copy of the block with decoded weights."""
    block = copy.deepcopy(block)
    for stack in (block.experts.gate_up_proj, block.experts.down_proj):
        stack.copy_(fake_quantize(stack))
    for linears in ((block.mlp.gate_proj, block.mlp.up_proj), (block.mlp.down_proj,)):
        values = tiny_models.decoded([m.weight for m in linears])
        for linear, value in zip(linears, values, strict=True):
            linear.weight.copy_(value)
    return block


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_equals_eager_and_decoded_weights(dtype, device):
    """Inductor, one graph of both blocks: it must not look into the quantizer."""
    block = Block(DTYPES[dtype])
    replaced = decode_block(block).to(device)
    block.to(device)
    prepare_qat(block, {"targets": ["experts", "linear"]})
    weights = prepared_weights(block)
    assert len(weights) == 5

    @torch.compile(fullgraph=True)
    def both(*inputs):
        return block(*inputs), replaced(*inputs), [w.effective() for w in weights]

    x = torch.randn(4, 64).to(device, DTYPES[dtype])
    chosen = torch.tensor([[0, 3], [1, 7], [3, 2], [6, 5]], device=device)
    got, expected, effective = both(x, chosen, torch.full_like(x[:, :2], 0.5))
    assert_same_bits(got.detach().cpu(), expected.detach().cpu(), "compiled block")
    for weight, value in zip(weights, effective, strict=True):
        eager = weight.effective().detach().cpu()
        assert_same_bits(value.detach().cpu(), eager, weight.parameter_name)
    (got.sum() + expected.sum()).backward()
    for (name, p), q in zip(block.named_parameters(), replaced.parameters(), strict=True):
        assert_same_bits(p.grad.cpu(), q.grad.cpu(), f"gradient of {name}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_effective_weight_is_what_an_engine_decodes(dtype):
    """Ship the weights as a trainer does, quantize them as an engine does, decode, compare."""
    model = prepare_qat(tiny_models.moe(DTYPES[dtype]))
    for weight in prepared_weights(model):
        values = weight.effective().detach()
        assert values.dtype == DTYPES[dtype]
        kind = "w2" if weight.attribute == "down_proj" else "w13"
        for e, shipped in enumerate(weight.parameter().detach().to(torch.bfloat16)):
            decoded = dequantize(loaded(shipped, kind))
            assert_same_bits(values[e].float(), decoded.float(), f"{weight.parameter_name}[{e}]")


def loaded(matrix, kind):
    """One expert's matrix as ``WeightUnits`` stores it, from the checkpoint's parts."""
    rows, k = matrix.shape
    units = WeightUnits(
        "layer.w13",
        ("w1", "w3") if kind == "w13" else ("w2",),
        torch.zeros((1, rows, k // 2), dtype=torch.uint8),
        torch.zeros((1, rows, k // 16), dtype=torch.float8_e4m3fn),
        torch.ones(1),
        lambda unit: [],
    )
    for part, start in zip(units.parts, (0, rows // 2), strict=False):
        stop = rows if kind == "w2" else start + rows // 2
        units.stage(0)[start:stop] = matrix[start:stop]
        done = units.arrived(0, [part], matrix[start:stop], part)
    assert done
    return units.quantized(0)
