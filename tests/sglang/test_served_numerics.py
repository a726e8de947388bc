"""The served engine against transformers forwards of the same checkpoint, and against vLLM's bytes.

Four engines answer everything here: W4A4 (with a look inside), W4A16 in float32 and bfloat16, and
unquantized bfloat16, which is the floor. The checks of a captured MoE call are those of vLLM's
suite.
"""

import pytest
import torch

from quads_common.format import QuantizedTensor
from quads_common.quantize import quantize
from tests.sglang.compensated import GROUP, SCORED, heldout
from tests.sglang.compensated_reference import check_logprobs
from tests.sglang.engine import run_engine
from tests.vllm import reference
from tests.vllm.test_served_numerics import differences, layer_errors, stored

pytestmark = pytest.mark.sglang

PROMPTS = 100
CAPTURED = 12  # sequences in the batch that is looked into
W4A16 = '{"quantization_config": {"act": "bf16"}}'
PLAIN = '{"quantization_config": {"method": "nvfp4"}}'


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
    return run(
        ("report", "report", []),
        ("units", "inside", ["units"]),
        ("calls", "moe_calls", [sequences[:CAPTURED]]),
        ("refresh", "error_of", ["quads_refresh"]),
        ("vLLM's", "in_groups", [heldout()[SCORED], GROUP]),
        quantization="quads_nvfp4",
        json_model_override_args=PLAIN,
    )


def test_w4a16_in_float32(arith_moe, sequences, run):
    """Where SGLang's own rounding does not hide it."""
    engine = run(quantization="quads_nvfp4", json_model_override_args=W4A16, dtype="float32")
    model = reference.load(arith_moe, torch.float32)
    unquantized = reference.logprobs(model, sequences)
    reference.quantize_weights(model)
    gap = differences(engine["logprobs"], reference.logprobs(model, sequences))
    print(f"W4A16 in float32: {gap.mean()=} {gap.max()=}")
    assert gap.mean() <= 1e-4, f"{gap.mean()=}"
    assert gap.quantile(0.999) <= 1e-2, f"{gap.quantile(0.999)=}"
    assert differences(engine["logprobs"], unquantized).mean() > 1e-2, "quantization is not seen"


def test_w4a16_in_bfloat16(arith_moe, sequences, run):
    """The floor is unquantized bfloat16 SGLang against bfloat16 transformers."""
    engine = run(quantization="quads_nvfp4", json_model_override_args=W4A16)
    model = reference.load(arith_moe, torch.bfloat16)
    floor = differences(run()["logprobs"], reference.logprobs(model, sequences)).mean()
    reference.quantize_weights(model)
    gap = differences(engine["logprobs"], reference.logprobs(model, sequences)).mean()
    print(f"W4A16 in bfloat16: {gap=} {floor=}")
    assert gap <= 1.5 * floor, f"{gap=} {floor=}"


def test_w4a4_end_to_end(arith_moe, sequences, w4a4):
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


def test_w4a4_against_vllm(w4a4):
    """What vLLM gave for other sequences, within the noise of another order of summation."""
    check_logprobs("nvfp4", w4a4["vLLM's"])


def prefill_calls(w4a4, layers=4):
    """The captured calls of the whole batch, one per layer at least."""
    calls = [c for c in w4a4["calls"] if c["x"].shape[0] > CAPTURED]
    assert len(calls) >= layers, f"{len(calls)=}"
    return calls


def test_w4a4_layers(w4a4):
    """Byte equality of every activation's codes, and the output within the derived bound."""
    (units,) = w4a4["units"]
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
    call = prefill_calls(w4a4)[0]
    plain = {**call, "quantized": call["quantized"][:1]}
    assert layer_errors(plain, *stored(w4a4["units"][0], call["layer"]))


def test_bytes_are_the_trainers(w4a4, arith_moe):
    """Packed bytes, scale bytes and global scales of all experts; vLLM's suite holds vLLM to the
    same quantizer."""
    from safetensors.torch import load_file

    weights = load_file(arith_moe / "model.safetensors")
    (units,) = w4a4["units"]
    assert len(units) == 4 * 16 * 2
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        for e in range(16):
            gate, up, down = (
                weights[f"{experts}.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")
            )
            for which, weight in (("w13", torch.cat([gate, up])), ("w2", down)):
                q, found = quantize(weight), units[f"{experts}.{which}[{e}]"]
                assert torch.equal(found["packed"], q.packed)
                assert torch.equal(found["block_scale"], q.block_scale.view(torch.uint8))
                assert torch.equal(found["global_scale"], q.global_scale)


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
    assert message in w4a4["refresh"]
