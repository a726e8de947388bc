"""Tensor and expert parallel engines hold the same bytes as one rank, updates included."""

import pytest
import torch
from safetensors.torch import load_file

from quads_common.fingerprint import differing, fingerprint
from quads_common.quantize import quantize
from tests.sglang.engine import run_engine

pytestmark = pytest.mark.sglang

ALL_LINEARS = '{"quantization_config": {"targets": "all"}}'


@pytest.fixture(scope="module")
def two_ranks(arith_moe, second_checkpoint, tmp_path_factory):
    """Two ranks with every linear quantized too; each expert parallel size is started once."""
    found = {}
    probes = [
        ("state", "observe", []),
        ("experts", "inside", ["experts"]),
        ("synced", "synced", [str(second_checkpoint)]),
        ("wrong", "error_on_one_rank", [str(second_checkpoint)]),
    ]

    def engine(ep_size):
        if ep_size not in found:
            found[ep_size] = run_engine(
                tmp_path_factory.mktemp(f"ep{ep_size}"),
                arith_moe,
                probes,
                quantization="quads_nvfp4",
                json_model_override_args=ALL_LINEARS,
                tp_size=2,
                ep_size=ep_size,
                variables={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
            )
        return found[ep_size]

    return engine


def expected_prints(weights):
    """What the trainer's quantizer gives for a checkpoint's experts and attention linears."""
    expected = {}
    for layer in range(4):
        mlp, attention = f"model.layers.{layer}.mlp.experts", f"model.layers.{layer}.self_attn"
        for e in range(16):
            gate, up, down = (weights[f"{mlp}.{e}.{n}_proj.weight"] for n in ("gate", "up", "down"))
            expected[f"{mlp}.{e}.w13"] = fingerprint(quantize(torch.cat([gate, up])))
            expected[f"{mlp}.{e}.w2"] = fingerprint(quantize(down))
        qkv = {n: weights[f"{attention}.{n}_proj.weight"] for n in "qkv"}
        amax = torch.stack([w.abs().amax() for w in qkv.values()]).amax().float()
        for n, weight in qkv.items():
            expected[f"{attention}.{n}_proj"] = fingerprint(quantize(weight, amax=amax))
        output = weights[f"{attention}.o_proj.weight"]
        expected[f"{attention}.o_proj"] = fingerprint(quantize(output))
    return expected


@pytest.mark.parametrize("ep_size", [1, 2], ids=["tensor parallel", "expert parallel"])
def test_bytes_of_two_ranks(two_ranks, arith_moe, second_checkpoint, ep_size):
    """The shards' fingerprints add up to those of whole tensors, before and after an update."""
    engine = two_ranks(ep_size)
    for key, path in (("state", arith_moe), ("synced", second_checkpoint)):
        state = engine[key]["state"]
        prints = {name: digest for name, digest in state.items() if " of " not in name}
        expected = expected_prints(load_file(path / "model.safetensors"))
        assert not differing(expected, prints), key
    assert engine["state"]["addresses"] == engine["synced"]["addresses"]
    assert engine["state"]["tokens"] != engine["synced"]["tokens"]


@pytest.mark.parametrize("ep_size", [1, 2], ids=["tensor parallel", "expert parallel"])
def test_experts_of_two_ranks(two_ranks, ep_size):
    for rank, placement in enumerate(two_ranks(ep_size)["experts"]):
        ids = list(range(16)) if ep_size == 1 else list(range(8 * rank, 8 * rank + 8))
        assert placement == {f"model.layers.{i}.mlp.experts": ids for i in range(4)}


@pytest.mark.parametrize("ep_size", [1, 2], ids=["tensor parallel", "expert parallel"])
def test_an_error_of_any_rank_is_reported(two_ranks, ep_size):
    """Expert 15 is rank 1's under expert parallelism; SGLang asks rank 0 only."""
    wrong = two_ranks(ep_size)["wrong"]
    assert "model.layers.2.mlp.experts.15.w2: NaN or Inf" in wrong["error"]
    assert wrong["changed"] == []
    assert wrong["tokens"] == two_ranks(ep_size)["synced"]["tokens"]
