"""The served engine against transformers forwards of the same checkpoint.

Four engines answer everything here: W4A4 (with a look inside), W4A16 in float32 and bfloat16, and
unquantized bfloat16, which is the floor.
"""

import pytest
import torch

from quads_common.format import QuantizedTensor
from quads_common.gemm import accumulation_bound
from quads_common.packing import unscaled_values
from quads_common.quantize import dequantize, quantize
from tests.vllm import reference
from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine

PROMPTS = 100
CAPTURED = 12  # sequences in the batch that is looked into
W4A16 = {"quads": {"act": "bf16"}}


@pytest.fixture(scope="module")
def sequences(arith_moe, problems):
    """Token ids of held-out problems with their answers."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arith_moe)
    texts = [prompt + answer for prompt, answer in problems.heldout(PROMPTS, seed=3)]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="module")
def run(arith_moe, sequences, tmp_path_factory):
    """Run an engine on the checkpoint for the log-probs of the sequences, and more if asked."""

    def engine(*more, **options):
        probes = [("logprobs", "logprobs", [sequences]), *more]
        return run_engine(tmp_path_factory.mktemp("engine"), arith_moe, probes, **options)

    return engine


@pytest.fixture(scope="module")
def w4a4(run, sequences):
    """Plain W4A4, looked into."""
    calls = ("calls", "moe_calls", [sequences[:CAPTURED]])
    return run(
        ("report", "report", []),
        ("units", "units", []),
        calls,
        ("refresh", "error_of", ["quads_refresh"]),
        quantization="quads_nvfp4",
        additional_config={"quads": {"method": "nvfp4"}},
    )


@pytest.fixture(scope="module")
def bf16_reference(arith_moe, sequences):
    """Unquantized transformers in bfloat16."""
    return reference.logprobs(reference.load(arith_moe, torch.bfloat16), sequences)


def differences(a, b):
    """All |log-prob differences| of two lists of sequences."""
    return torch.cat([(x.double() - y.double()).abs() for x, y in zip(a, b, strict=True)])


def test_w4a16_in_float32(arith_moe, sequences, run):
    engine = run(quantization="quads_nvfp4", additional_config=W4A16, dtype="float32")
    model = reference.load(arith_moe, torch.float32)
    reference.quantize_weights(model)
    gap = differences(engine["logprobs"], reference.logprobs(model, sequences))
    assert gap.mean() <= 1e-4, f"{gap.mean()=}"
    assert gap.quantile(0.999) <= 1e-2, f"{gap.quantile(0.999)=}"
    unquantized = reference.logprobs(reference.load(arith_moe, torch.float32), sequences)
    assert differences(engine["logprobs"], unquantized).mean() > 1e-2, "quantization is not seen"


def test_w4a16_in_bfloat16(arith_moe, sequences, run, bf16_reference):
    engine = run(quantization="quads_nvfp4", additional_config=W4A16)
    floor = differences(run()["logprobs"], bf16_reference).mean()
    model = reference.load(arith_moe, torch.bfloat16)
    reference.quantize_weights(model)
    expected = reference.logprobs(model, sequences)
    gap = differences(engine["logprobs"], expected).mean()
    assert gap <= 1.5 * floor, f"{gap=} {floor=}"


def test_w4a4_end_to_end(arith_moe, sequences, w4a4, bf16_reference):
    model = reference.load(arith_moe, torch.bfloat16)
    reference.use_w4a4(model, reference.plain_matmul)
    expected = reference.logprobs(model, sequences)
    other = reference.load(arith_moe, torch.bfloat16, attention="eager")
    reference.use_w4a4(other, reference.split_matmul)
    reference.reorder_linears(other)
    noise = differences(expected, reference.logprobs(other, sequences))
    gap = differences(w4a4["logprobs"], expected)
    assert gap.mean() <= 1.5 * noise.mean(), f"{gap.mean()=} {noise.mean()=}"
    assert gap.quantile(0.99) <= 1.5 * noise.quantile(0.99), (
        f"{gap.quantile(0.99)=} {noise.quantile(0.99)=}"
    )


def stored(units, layer):
    """w13 and w2 [E, ...] of a layer as the engine holds them."""
    found = {}
    for name in ("w13", "w2"):
        prefix = f"{layer}.{name}["
        rows = [units[k] for k in sorted((k for k in units if k.startswith(prefix)), key=by_index)]
        found[name] = QuantizedTensor(
            torch.stack([r["packed"] for r in rows]),
            torch.stack([r["block_scale"] for r in rows]).view(torch.float8_e4m3fn),
            torch.stack([r["global_scale"] for r in rows]),
        )
    return found["w13"], found["w2"]


def by_index(key):
    return int(key.rpartition("[")[2][:-1])


def layer_errors(call, w13, w2):
    """What is wrong with one captured MoE call: a list of sentences, empty if nothing.

    Codes and scales of every activation are compared byte for byte with the quantizer on the
    captured inputs; the output with float64 on the codes that the engine used.
    """
    errors = []
    first, *later = call["quantized"]
    hit = call["topk_ids"].unique().tolist()
    if len(later) != len(hit):
        return [f"{len(later)} second activations quantized for {len(hit)} experts"]
    if not same_codes(first, quantize(call["x"], per_token=True)):
        errors.append("codes of the first activation")
    a, a_scale = operand(first)
    tokens, slots = call["topk_ids"].shape
    terms = torch.zeros((tokens, slots, call["x"].shape[1]), dtype=torch.float64)
    bounds = torch.zeros_like(terms)
    for expert, second in zip(hit, later, strict=True):
        token, slot = torch.where(call["topk_ids"] == expert)
        b = unscaled_values(w13.packed[expert], w13.block_scale[expert]).double()
        alpha = (a_scale[token] * w13.global_scale[expert]).double()
        y = (a[token] @ b.T) * alpha
        bound = accumulation_bound(a[token].abs() @ b.abs().T, b.shape[1]) * alpha
        errors += check_activation(expert, second, y, bound)
        if not same_codes(second, quantize(second["x"], per_token=True)):
            errors.append(f"codes of the second activation, expert {expert}")
        h, h_scale = operand(second)
        b = unscaled_values(w2.packed[expert], w2.block_scale[expert]).double()
        weight = call["topk_weights"][token, slot].double().unsqueeze(1)
        alpha = (h_scale * w2.global_scale[expert]).double() * weight
        terms[token, slot] = (h @ b.T) * alpha
        bounds[token, slot] = accumulation_bound(h.abs() @ b.abs().T, b.shape[1]) * alpha.abs()
    expected = terms.sum(dim=1)
    # float32 epilogue (two products, the sum over slots) and the last rounding to bfloat16
    bound = bounds.sum(1) + terms.abs().sum(1) * (slots + 2) * 2.0**-24
    bound = bound + (expected.abs() + bound) * 2.0**-8
    excess = ((call["out"].double() - expected).abs() - bound).max()
    if excess > 0:
        errors.append(f"output beyond the bound by {excess:.3g}")
    return errors


def check_activation(expert, second, y, bound):
    """The captured input of the second quantizer against SwiGLU of the float64 first GEMM.

    y may be rounded to either bfloat16 neighbour within its bound; the product is rounded once.
    """
    slack = bound + y.abs() * 2.0**-8
    gate, up = y.chunk(2, dim=-1)
    gate_slack, up_slack = slack.chunk(2, dim=-1)
    silu = gate * torch.sigmoid(gate)
    # |silu'| <= 1.1
    error = 1.1 * gate_slack * (up.abs() + up_slack) + silu.abs() * up_slack
    error = error + (silu * up).abs() * 2.0**-8 + 1e-30
    excess = ((second["x"].double() - silu * up).abs() - error).max()
    return [f"second activation of expert {expert} off by {excess:.3g}"] if excess > 0 else []


def same_codes(captured, q):
    """Whether a captured quantization equals q byte for byte."""
    return (
        torch.equal(captured["packed"], q.packed)
        and torch.equal(captured["block_scale"], q.block_scale.view(torch.uint8))
        and torch.equal(captured["global_scale"], q.global_scale)
    )


def operand(captured):
    """float64 operand and float32 row scale of a captured quantization."""
    scale = captured["block_scale"].view(torch.float8_e4m3fn)
    return unscaled_values(captured["packed"], scale).double(), captured["global_scale"]


def prefill_calls(w4a4, layers=4):
    """The captured calls of the whole batch, one per layer."""
    calls = [c for c in w4a4["calls"][0]["calls"] if c["x"].shape[0] > CAPTURED]
    assert len(calls) >= layers, f"{len(calls)=}"
    return calls


def test_w4a4_layers(w4a4):
    """Byte equality of every activation's codes, and the output within the derived bound."""
    units = w4a4["units"][0]
    for call in prefill_calls(w4a4):
        errors = layer_errors(call, *stored(units, call["layer"]))
        assert not errors, f"{call['layer']}: {errors}"


def test_a_doubled_global_scale_is_noticed(w4a4):
    call = prefill_calls(w4a4)[0]
    w13, w2 = stored(w4a4["units"][0], call["layer"])
    for which, q in (("w13", w13), ("w2", w2)):
        scale = q.global_scale.clone()
        scale[call["topk_ids"][0, 0]] *= 2
        wrong = QuantizedTensor(q.packed, q.block_scale, scale)
        pair = (wrong, w2) if which == "w13" else (w13, wrong)
        assert layer_errors(call, *pair), which


def test_an_unquantized_second_input_is_noticed(w4a4):
    """What an engine would return that forgets to quantize w2's input."""
    call = prefill_calls(w4a4)[0]
    w13, w2 = stored(w4a4["units"][0], call["layer"])
    plain = {**call, "quantized": call["quantized"][:1]}
    assert layer_errors(plain, w13, w2), "the missing quantization"
    out = torch.zeros_like(call["out"], dtype=torch.float32)
    hit = call["topk_ids"].unique().tolist()
    for expert, second in zip(hit, call["quantized"][1:], strict=True):
        token, slot = torch.where(call["topk_ids"] == expert)
        weight = dequantize(
            QuantizedTensor(w2.packed[expert], w2.block_scale[expert], w2.global_scale[expert]),
            torch.float32,
        )
        term = (second["x"].float() @ weight.T) * call["topk_weights"][token, slot].unsqueeze(1)
        out.index_add_(0, token, term)
    assert layer_errors({**call, "out": out.to(call["out"].dtype)}, w13, w2), "its output"


def test_report(w4a4):
    (report,) = w4a4["report"]
    assert (report["method"], report["act"], report["backend"]) == ("nvfp4", "nvfp4", "emulated")
    assert report["layers_quantized"] == 4
    assert report["layers_kept"] == 4 * 3  # qkv, o and router
    experts = 4 * 16 * 3 * 64 * 256
    saved = report["bytes_before"] - report["bytes_after"]
    packed = experts // 2 + experts // 16 + 2 * 4 * 16 * 4
    assert saved == experts * 2 - packed, f"{report=}"


def test_a_plain_engine_has_nothing_to_refresh(w4a4):
    message = "ValueError: this engine compensates nothing: it was started with method 'nvfp4'"
    assert w4a4["refresh"] == message
