"""Tensor and expert parallel engines hold the same bytes as one rank; bad shards are refused."""

import pytest
import torch
from safetensors.torch import load_file

from quads_common.fingerprint import combine_ranks, fingerprint
from quads_common.quantize import quantize
from tests.vllm.engine import run_engine

pytestmark = pytest.mark.engine

ALL_LINEARS = {"quads": {"targets": "all"}}
TWO_RANKS = {
    "in_process": False,
    "tensor_parallel_size": 2,
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
}


@pytest.fixture(scope="module")
def run(arith_moe, second_checkpoint, tmp_path_factory):
    """An engine on the checkpoint with every linear quantized too."""

    probes = [
        ("units", "units", []),
        ("experts", "experts", []),
        ("prints", "fingerprints", []),
        ("synced", "reload_and_print", [str(second_checkpoint)]),
    ]

    def engine(**options):
        return run_engine(
            tmp_path_factory.mktemp("engine"),
            arith_moe,
            probes,
            quantization="quads_nvfp4",
            additional_config=ALL_LINEARS,
            **options,
        )

    return engine


@pytest.fixture(scope="module")
def whole(run):
    """One rank."""
    return run()


@pytest.fixture(scope="module")
def tensor_parallel(run):
    """Two ranks, every expert and linear split."""
    return run(**TWO_RANKS)


@pytest.fixture(scope="module")
def expert_parallel(run):
    """Two ranks, each with half of the experts; attention split."""
    return run(enable_expert_parallel=True, **TWO_RANKS)


def halves(name, first, second):
    """The two ranks' shards of a unit put together, by field."""
    layer = name.rpartition(".")[2].partition("[")[0]
    if layer in ("w2", "o_proj"):  # K is split

        def join(a, b):
            return torch.cat([a, b], dim=1)

    elif layer == "w13":  # gate and up are split apart

        def join(a, b):
            return torch.cat(
                [*(x[: len(x) // 2] for x in (a, b)), *(x[len(x) // 2 :] for x in (a, b))]
            )

    else:  # q [256], k [128], v [128] rows

        def join(a, b):
            parts = zip(a.split([128, 64, 64]), b.split([128, 64, 64]), strict=True)
            return torch.cat([x for pair in parts for x in pair])

    return {f: join(first[f], second[f]) for f in ("packed", "block_scale")}


def test_tensor_parallel_bytes(whole, tensor_parallel):
    (expected,) = whole["units"]
    first, second = tensor_parallel["units"]
    assert expected.keys() == first.keys() == second.keys()
    assert len(expected) == 4 * (2 * 16 + 2)
    for name, unit in expected.items():
        joined = halves(name, first[name], second[name])
        for field in ("packed", "block_scale"):
            assert torch.equal(joined[field], unit[field]), f"{name} {field}"
        for rank in (first, second):
            assert torch.equal(rank[name]["global_scale"], unit["global_scale"]), name


def test_expert_parallel_bytes(whole, expert_parallel):
    (expected,) = whole["units"]
    seen = 0
    for units, experts in zip(expert_parallel["units"], expert_parallel["experts"], strict=True):
        for layer, ids in experts.items():
            for local, global_id in enumerate(ids):
                for which in ("w13", "w2"):
                    ours = units[f"{layer}.{which}[{local}]"]
                    theirs = expected[f"{layer}.{which}[{global_id}]"]
                    assert all(torch.equal(ours[f], theirs[f]) for f in ours), (layer, global_id)
                    seen += 1
    assert seen == 4 * 16 * 2


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


@pytest.mark.parametrize("engine", ["whole", "tensor_parallel", "expert_parallel"])
def test_fingerprints_equal_the_trainers(request, engine, checkpoint, second_checkpoint):
    """After loading, after a reload from disk and after raw loads, whatever the ranks hold."""
    results = request.getfixturevalue(engine)
    assert combine_ranks(results["prints"]) == expected_prints(checkpoint)
    second = expected_prints(load_file(second_checkpoint / "model.safetensors"))
    for prints in results["synced"]:
        assert combine_ranks(prints) == second
