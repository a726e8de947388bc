"""Refused features: every row of ``refusals``, alone and through SGLang's ``ServerArgs``.

``test_every_refusal_has_a_case`` fails for a new one without a case here.
"""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tests.sglang.server_args import BASE, server_args

pytestmark = pytest.mark.sglang

# Field: (value, what else ServerArgs needs, a part of the message, what is no reason to refuse).
ARGS = {
    "enable_lora": (True, {"max_lora_rank": 8, "lora_target_modules": ["all"]}, "LoRA", False),
    "lora_paths": (["name=nowhere"], {}, "LoRA", []),
    "enable_eplb": (True, {}, "expert load balancing", False),
    "ep_num_redundant_experts": (2, {}, "expert load balancing", 0),
    "init_expert_location": ("somewhere.json", {}, "expert load balancing", "trivial"),
    "elastic_ep_backend": ("mooncake", {}, "elastic EP (--elastic-ep-backend mooncake)", None),
    "moe_a2a_backend": ("deepep", {"tp_size": 2}, "--moe-a2a-backend deepep", "none"),
    "moe_runner_backend": ("cutlass", {}, "--moe-runner-backend cutlass: use auto", "triton"),
    "model_impl": ("transformers", {}, "--model-impl transformers, where q, k and v", "sglang"),
    "dtype": ("float16", {}, "--dtype float16 (outputs of GEMMs", "float32"),
    "pp_size": (2, {}, "pipeline parallelism (--pp-size 2)", 1),
    "speculative_algorithm": (
        "NGRAM", {"speculative_num_draft_tokens": 2}, "speculative decoding", None,
    ),
    "cpu_offload_gb": (1, {}, "CPU offloading", 0),
    "offload_group_size": (1, {}, "CPU offloading", -1),
    "kt_weight_path": ("nowhere", {}, "KTransformers", None),
    "enable_two_batch_overlap": (True, {}, "batch overlap", False),
    "enable_single_batch_overlap": (True, {}, "batch overlap", False),
    "torchao_config": ("int8wo", {}, "torchao (--torchao-config int8wo)", ""),
    "rl_quant_profile": ("nowhere.pt", {}, "FlashRL's profile", None),
    "weight_cache_mode": ("auto", {}, "the shared weight cache (--weight-cache-mode auto)", "off"),
}  # fmt: skip
# Load format: a part of the message.
FORMATS = {
    "flash_rl": "load format 'flash_rl': use one of ['auto', ",
    "sharded_state": "load format 'sharded_state': use one of",
}
# A part of the message: (arguments of ``check_model``, those that are no reason to refuse).
MODELS = {
    "CUDA graphs (backend emulated): add --disable-cuda-graph": (
        ({"device": "cuda"}, "bfloat16", "emulated", "nvfp4"),
        [
            ({"device": "cpu"}, "bfloat16", "emulated", "nvfp4"),
            ({"device": "cuda", "disable_cuda_graph": True}, "bfloat16", "emulated", "nvfp4"),
            ({"device": "cuda"}, "bfloat16", "triton", "nvfp4"),
        ],
    ),
    "--dtype float32 with act bf16 (backend triton)": (
        ({"device": "cuda"}, "float32", "triton", "bf16"),
        [
            ({"device": "cpu"}, "float32", "emulated", "bf16"),
            ({"device": "cuda"}, "float32", "triton", "nvfp4"),
            ({"device": "cuda"}, "bfloat16", "triton", "bf16"),
        ],
    ),
}


def refusal(call, *arguments) -> str:
    """What a check says; "" for nothing."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)
    return ""


def args(**fields):
    return SimpleNamespace(**fields)


def test_every_refusal_has_a_case():
    from sglang_quads import refusals

    assert list(ARGS) == list(refusals.REFUSED_ARGS)
    assert len(MODELS) == len(refusals.REFUSED_MODELS)
    for row, case in zip(refusals.REFUSED_MODELS, MODELS, strict=True):
        assert row.partition(" (")[0] == case.partition(" (")[0]


@pytest.mark.parametrize("field", ARGS)
def test_each_argument_alone_is_refused(field):
    """Through no other row: a row that is taken out shows."""
    from sglang_quads.refusals import check_server_args

    value, _, message, allowed = ARGS[field]
    found = refusal(check_server_args, args(**{field: value}))
    assert found.startswith(f"quads_nvfp4 does not support {message}"), found
    for harmless in (allowed, None):
        assert refusal(check_server_args, args(**{field: harmless})) == ""
    assert refusal(check_server_args, args()) == ""


@pytest.mark.parametrize("value", ["half", "Float16", torch.float16], ids=str)
def test_every_way_to_say_float16(value):
    from sglang_quads.refusals import check_server_args

    assert f"--dtype {value} " in refusal(check_server_args, args(dtype=value))


@pytest.mark.parametrize("name", FORMATS)
def test_load_formats(name):
    from sglang_quads.refusals import check_load_format, check_server_args

    for found in (
        refusal(check_load_format, name),
        refusal(check_server_args, args(load_format=name)),
    ):
        assert found.startswith(f"quads_nvfp4 does not support {FORMATS[name]}"), found


@pytest.mark.parametrize("message", MODELS)
def test_what_depends_on_the_model(message):
    from sglang_quads.refusals import check_model

    refused, allowed = MODELS[message]
    found = refusal(check_model, args(**refused[0]), *refused[1:])
    assert found.startswith(f"quads_nvfp4 does not support {message}"), found
    for fields, *others in allowed:
        assert refusal(check_model, args(**fields), *others) == ""


@pytest.fixture(scope="module")
def answers(arith_moe):
    """What SGLang says, from one process, of the arguments that this version has."""
    from sglang.srt.server_args import ServerArgs

    known = {field.name for field in dataclasses.fields(ServerArgs)}
    cases = {
        field: {**more, field: value} for field, (value, more, *_) in ARGS.items() if field in known
    }
    cases |= {name: {"load_format": name} for name in FORMATS}
    return server_args(
        {
            name: {
                "arguments": {**BASE, "model_path": str(arith_moe), **arguments},
                "environment": {},
            }
            for name, arguments in cases.items()
        }
    )


@pytest.mark.parametrize("case", [*ARGS, *FORMATS])
def test_sglang_refuses_before_a_process_is_started(answers, case):
    if case not in answers:
        assert case == "weight_cache_mode"
        pytest.skip("this SGLang has no --weight-cache-mode")
    message = FORMATS.get(case) or ARGS[case][2]
    error = answers[case]["error"]
    assert error.startswith(f"ValueError: quads_nvfp4 does not support {message}"), error


def test_float16_of_a_checkpoint_is_refused():
    """``--dtype auto`` may mean it; SGLang compares with what the method names."""
    from sglang_quads.config import QuadsNvfp4Config

    assert QuadsNvfp4Config().get_supported_act_dtypes() == [torch.bfloat16, torch.float32]


TRANSFORMERS = ("TransformersForCausalLM", "TransformersMultiModalMoEForCausalLM")


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_are_refused(name):
    """SGLang takes them by itself for architectures that it does not know."""
    from sglang_quads.config import QuadsNvfp4Config

    model_class = type(name, (), {})
    found = refusal(QuadsNvfp4Config().prepare, None, None, model_class, None)
    assert found.startswith(f"quads_nvfp4 does not support {name}: this SGLang has no model"), found


def test_sglang_names_its_models_of_transformers_so():
    from sglang.srt.models import transformers

    names = [found.__name__ for found in transformers.EntryClass]
    assert set(TRANSFORMERS) < set(names)
    assert all(name.startswith("Transformers") for name in names)


def test_sglangs_own_models_are_not_refused():
    from sglang_quads.refusals import check_model_class

    assert refusal(check_model_class, type("Qwen3MoeForCausalLM", (), {})) == ""
