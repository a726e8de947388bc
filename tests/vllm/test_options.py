"""Option errors, refused features and the environment variable: up to vLLM's configuration.

Nothing here starts an engine: ``create_engine_config`` is what ``vllm serve`` runs first, in the
process that the user sees.
"""

import json
import os
import subprocess
import sys

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from quads_common.compensation import CompensationOptions, write_selection_file
from vllm_quads.config import QuadsNvfp4Config
from vllm_quads.patches import ENVIRONMENT_VARIABLE
from vllm_quads.refusals import check_supported

load_general_plugins()


def config(model, **options):
    """vLLM's configuration of a model under our method."""
    options.setdefault("quantization", "quads_nvfp4")
    return EngineArgs(
        model=str(model), dtype="bfloat16", max_model_len=64, **options
    ).create_engine_config()


def prepared(vllm_config):
    """The method's options as a worker sees them."""
    return vllm_config.quant_config.options


def given(way, options, monkeypatch):
    """Engine arguments that carry the options in one of the three ways."""
    if way == "hf_overrides":
        return {"hf_overrides": {"quantization_config": options}}
    if way == "additional_config":
        return {"additional_config": {"quads": options}}
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps(options))
    return {}


OVERRIDES = {
    "unknown key": (
        {"rac_ration": 0.5},
        r"unknown option 'rac_ration'; allowed are \['method', 'act'",
    ),
    "act": ({"act": "int4"}, r"act 'int4' is not allowed: one of \['nvfp4', 'bf16'\]"),
    "method": ({"method": "best"}, r"method 'best' is not allowed: one of \['nvfp4', 'quads', "),
    "ratio": ({"rac_ratio": 1.5}, r"rac_ratio 1.5 is not allowed: a number from 0 to 1"),
    "kinds": ({"compensate": ["w3"]}, r"compensate \['w3'\] is not allowed: some of \['w13'"),
    "statistic": ({"splice_statistic": "max"}, r"splice_statistic 'max' is not allowed: one of"),
    "act and method": (
        {"act": "bf16", "method": "foursight"},
        r"method 'foursight' compensates quantized activations, and act 'bf16' quantizes none",
    ),
    "nothing to distribute": (
        {"method": "nvfp4", "adaptive": True},
        r"adaptive true is not allowed with rac_ratio 0",
    ),
    "rule": (
        {"global_scale_rule": "max"},
        r"global_scale_rule 'max' is not allowed: one of \['pow2', 'te'\]",
    ),
    "backend": ({"backend": "marlin"}, r"backend 'marlin' is not allowed: one of \['auto', "),
    "targets type": ({"targets": 3}, r"targets must be a string or a list of strings, got 3"),
    "no targets": ({"targets": []}, r"targets is empty"),
    "regex": ({"ignore": ["re:("]}, r"ignore: 're:\(' is not a regular expression"),
}


@pytest.mark.parametrize("options, message", OVERRIDES.values(), ids=OVERRIDES.keys())
@pytest.mark.parametrize("way", ["hf_overrides", "additional_config", "environment"])
def test_option_errors(arith_moe, monkeypatch, way, options, message):
    arguments = given(way, options, monkeypatch)
    with pytest.raises(ValueError, match=message):
        config(arith_moe, **arguments)


@pytest.mark.parametrize("way", ["hf_overrides", "additional_config", "environment"])
def test_options_arrive(arith_moe, monkeypatch, way):
    options = {"act": "bf16", "ignore": "re:.*layers\\.0\\..*"}
    arguments = given(way, options, monkeypatch)
    found = prepared(config(arith_moe, **arguments))
    assert (found.act, found.ignore) == ("bf16", ("re:.*layers\\.0\\..*",))


@pytest.mark.parametrize("way", ["hf_overrides", "additional_config", "environment"])
def test_knobs_arrive(arith_moe, monkeypatch, way):
    options = {"method": "quads_splice", "rac_ratio": 0.25, "compensate": ["w13"], "adaptive": True}
    found = prepared(config(arith_moe, **given(way, options, monkeypatch))).compensation
    assert (found.rac_ratio, found.splice_count_w13, found.adaptive) == (0.25, 64, True)
    assert found.compensate == ("w13",)


@pytest.mark.parametrize(
    "options, preset",
    [({}, "quads"), ({"act": "bf16"}, "nvfp4"), ({"method": "nvfp4"}, "nvfp4")],
    ids=["quads", "act bf16", "named"],
)
def test_default_method(arith_moe, options, preset):
    found = prepared(config(arith_moe, additional_config={"quads": options}))
    assert found.preset == preset
    assert found.compensates == (preset != "nvfp4")


def test_conflicting_places(arith_moe):
    with pytest.raises(ValueError, match=r"'act' is 'bf16' in quantization_config and 'nvfp4' in"):
        config(
            arith_moe,
            hf_overrides={"quantization_config": {"act": "bf16"}},
            additional_config={"quads": {"act": "nvfp4"}},
        )


def test_environment_conflicts_with_the_command_line(arith_moe, monkeypatch):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"act": "bf16"}')
    with pytest.raises(ValueError, match=r"'act' is 'nvfp4' in .* and 'bf16' in VLLM_QUADS_CONFIG"):
        config(arith_moe, additional_config={"quads": {"act": "nvfp4"}})


def test_the_same_value_twice_is_no_conflict(arith_moe):
    vllm_config = config(
        arith_moe,
        hf_overrides={"quantization_config": {"targets": "experts"}},
        additional_config={"quads": {"targets": ["experts"]}},
    )
    assert prepared(vllm_config).targets == ("experts",)


@pytest.mark.parametrize(
    "arguments, variable",
    [
        (
            {
                "quantization": None,
                "hf_overrides": {"quantization_config": {"quant_method": "quads_nvfp4"}},
            },
            {},
        ),
        ({}, {"model": "*nowhere*"}),
    ],
    ids=["named by quantization_config", "pattern limits enabling only"],
)
def test_environment_options_always_count(arith_moe, monkeypatch, arguments, variable):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({**variable, "act": "bf16"}))
    assert prepared(config(arith_moe, **arguments)).act == "bf16"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, json.dumps({**variable, "axt": "bf16"}))
    with pytest.raises(ValueError, match=r"VLLM_QUADS_CONFIG: unknown option 'axt'"):
        config(arith_moe, **arguments)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"quantization_config": "bf16"}, "quantization_config must be an object, got 'bf16'"),
        ({"quantization_config_dict_json": "[1]"}, r"dict_json must be an object, got \[1\]"),
        (
            {"quantization_config_file": "/none.json"},
            "quantization_config_file '/none.json' cannot",
        ),
    ],
    ids=["string", "list", "file"],
)
def test_malformed_overrides(arith_moe, overrides, message):
    with pytest.raises(ValueError, match=message):
        config(arith_moe, hf_overrides=overrides)


def test_environment_reaches_the_compile_cache_key(arith_moe, monkeypatch):
    plain = config(arith_moe).compute_hash()
    assert config(arith_moe).compute_hash() == plain
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, '{"act": "bf16"}')
    assert config(arith_moe).compute_hash() != plain


@pytest.mark.parametrize(
    "variable, quantization",
    [
        ('{"enable": true}', "quads_nvfp4"),
        ('{"enable": true, "model": "*arith*"}', "quads_nvfp4"),
        ('{"enable": true, "model": "*reward*"}', None),
        ('{"act": "bf16"}', None),
    ],
    ids=["enable", "model matches", "model differs", "not enabled"],
)
def test_environment_switches_the_method_on(arith_moe, monkeypatch, variable, quantization):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, variable)
    assert config(arith_moe, quantization=None).model_config.quantization == quantization


@pytest.mark.parametrize(
    "variable, message",
    [
        ("{", "VLLM_QUADS_CONFIG is not valid JSON"),
        (
            "nowhere.json",
            "VLLM_QUADS_CONFIG='nowhere.json' is neither a JSON object nor a readable file",
        ),
        ('{"enable": 1}', '"enable" must be true or false'),
    ],
    ids=["json", "path", "enable"],
)
def test_environment_errors(arith_moe, monkeypatch, variable, message):
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, variable)
    with pytest.raises(ValueError, match=message):
        config(arith_moe)


def test_environment_file(arith_moe, monkeypatch, tmp_path):
    path = tmp_path / "quads.json"
    path.write_text('{"act": "bf16"}')
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(path))
    assert prepared(config(arith_moe)).act == "bf16"


def test_foreign_checkpoints_are_refused(arith_moe):
    overrides = {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4"}}
    message = r"already quantized \(quant_method 'compressed-tensors'\).* takes BF16 checkpoints"
    with pytest.raises(ValueError, match=message):
        config(arith_moe, hf_overrides=overrides)


REFUSED = {
    "lora": ({"enable_lora": True}, "LoRA"),
    "pipeline": ({"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}, "pipeline"),
    "transformers": ({"model_impl": "transformers"}, "Transformers backend .*q, k and v"),
    "load format": ({"load_format": "sharded_state"}, "load format .*sharded_state.*: use one of"),
    "speculative": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 1,
                "prompt_lookup_max": 2,
            }
        },
        "speculative decoding",
    ),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED.keys())
def test_refused_features(arith_moe, options, message):
    with pytest.raises(ValueError, match=message):
        config(arith_moe, **options)


def with_parallel(**values):
    """A configuration whose parallel settings no CPU would accept."""

    def change(vllm_config):
        for key, value in values.items():
            object.__setattr__(vllm_config.parallel_config, key, value)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (with_parallel(enable_eplb=True), "expert load balancing"),
        (
            with_parallel(
                data_parallel_size=2,
                enable_expert_parallel=True,
                all2all_backend="deepep_low_latency",
            ),
            "all-to-all backend 'deepep_low_latency'",
        ),
    ],
    ids=["eplb", "deepep"],
)
def test_refused_parallel_features(arith_moe, change, message):
    vllm_config = config(arith_moe)
    check_supported(vllm_config, "emulated", "nvfp4")
    change(vllm_config)
    with pytest.raises(ValueError, match=message):
        check_supported(vllm_config, "emulated", "nvfp4")


def test_float16_is_refused(arith_moe):
    with pytest.raises(ValueError, match=r"float16 is not supported for quantization"):
        EngineArgs(
            model=str(arith_moe), quantization="quads_nvfp4", dtype="float16", max_model_len=64
        ).create_engine_config()


def test_configuration_survives_pickling(arith_moe):
    import pickle

    quant = config(arith_moe).quant_config
    again = pickle.loads(pickle.dumps(quant))
    assert isinstance(again, QuadsNvfp4Config)
    assert again.options == quant.options


@pytest.mark.engine
def test_serve_stops_with_one_line(arith_moe, tmp_path):
    """The real command: a bad option ends it at once, and the last line says which and why."""
    command = [
        os.path.join(os.path.dirname(sys.executable), "vllm"),
        "serve",
        str(arith_moe),
        "--quantization=quads_nvfp4",
        "--additional-config",
        '{"quads": {"act": "int4"}}',
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "act 'int4' is not allowed: one of ['nvfp4', 'bf16']" in last, done.stderr[-2000:]


@pytest.mark.engine
def test_broken_plugin_is_visible(arith_moe, tmp_path):
    """An import error in the plugin ends the start and names the module."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules['quads_common.options'] = None\n"
    )
    code = (
        "from vllm.engine.arg_utils import EngineArgs\n"
        f"EngineArgs(model={str(arith_moe)!r}, quantization='quads_nvfp4').create_engine_config()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "quads_common.options" in last, done.stderr[-2000:]


def test_a_selection_file_is_looked_at_before_any_weight(arith_moe, tmp_path):
    """In the process that the user sees: the option, the file and what is wrong with it."""

    def started(path):
        return config(arith_moe, additional_config={"quads": {"selection_file": str(path)}})

    with pytest.raises(
        ValueError, match=r"selection_file cannot be used: /nope cannot be read: No such file"
    ):
        started("/nope")
    path = tmp_path / "s"
    path.write_text("no selection")
    with pytest.raises(ValueError, match=r"selection_file .* is not a selection file"):
        started(path)
    for options, tp_size, message in (
        (CompensationOptions.from_preset("quads"), 2, "tp_size 2, this engine has 1"),
        (CompensationOptions.from_preset("quads_splice"), 1, "splice_count_w13 64, this engine"),
    ):
        write_selection_file(path, [], tp_size=tp_size, options=options)
        with pytest.raises(ValueError, match=f"selection_file cannot be used: .*{message}"):
            started(path)
    write_selection_file(path, [], tp_size=1, options=CompensationOptions.from_preset("quads"))
    assert prepared(started(path)).selection_file == str(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compensate": [["w13"]]}, r"compensate \[\['w13'\]\] is not allowed: some of"),
        ({"compensate": [{}]}, r"compensate \[\{\}\] is not allowed: some of"),
        ({"sampling_rate": 5e-324}, "sampling_rate 5e-324 is not allowed"),
        ({"min_tokens": 10**400}, "min_tokens .* is not allowed: an integer from 1"),
    ],
    ids=["list", "object", "rate", "tokens"],
)
def test_odd_values_are_refused_by_name(arith_moe, options, message):
    with pytest.raises(ValueError, match=message):
        config(arith_moe, additional_config={"quads": options})
