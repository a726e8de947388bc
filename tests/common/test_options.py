"""Options: every error is one line with the source, the key, the value and what is allowed."""

import json
from dataclasses import FrozenInstanceError

import pytest

from quads_common import Placement, QuadsOptions
from quads_common.compensation import CompensationOptions
from quads_common.options import QUANT_METHOD, merge_options, read_environment_options

SOURCE = "--additional-config quads"
ALL_KEYS = (
    *("method", "act", "targets", "ignore", "global_scale_rule", "backend", "selection_file"),
    *("rac_ratio", "splice_count_w13", "compensate", "min_tokens", "adaptive"),
)
METHODS = ("nvfp4", "quads", "foursight", "quads_splice")


def refusal(raw: dict) -> str:
    with pytest.raises(ValueError) as error:
        QuadsOptions.from_dict(raw, SOURCE)
    message = str(error.value)
    assert "\n" not in message, f"more than one line: {message!r}"
    assert message.startswith(SOURCE), f"does not say where it comes from: {message!r}"
    return message


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("act", "fp8", ("nvfp4", "bf16")),
        ("act", None, ("nvfp4", "bf16")),
        ("act", ["nvfp4"], ("nvfp4", "bf16")),
        ("method", "nvfp5", METHODS),
        ("method", "", METHODS),
        ("method", 4, METHODS),
        ("method", ["quads"], METHODS),
        ("selection_file", 3, ("path",)),
        ("selection_file", "", ("path",)),
        ("rac_ratio", 1.5, ("from 0 to 1",)),
        ("rac_alpha", 0, ("above 0 to 1",)),
        ("splice_count_w2", -1, ("from 0",)),
        ("rac_statistic", "variances", ("residual", "variance", "second_moment")),
        ("compensate", "w13", ("w13", "w2", "linear")),
        ("sampling_rate", 0, ("above 0 to 1",)),
        ("adaptive", 1, ("true or false",)),
        ("global_scale_rule", "static", ("pow2", "te")),
        ("global_scale_rule", 2, ("pow2", "te")),
        ("backend", "cutlass", ("auto", "emulated")),
        ("backend", True, ("auto", "emulated")),
        ("targets", [], ("auto", "experts", "linear", "all")),
        ("targets", ["re:("], ("regular expression",)),
        ("targets", {"experts": True}, ("string", "list")),
        ("targets", ["experts", 3], ("string", "list")),
        ("targets", None, ("string", "list")),
        ("ignore", ["re:*"], ("regular expression",)),
        ("ignore", 5, ("string", "list")),
        ("ignore", [""], ("pattern",)),
    ],
    ids=str,
)
def test_from_dict_refuses_an_impossible_value(key, value, allowed):
    message = refusal({key: value})
    shown = (
        value[-1] if isinstance(value, list) and value and key in ("targets", "ignore") else value
    )
    for text in (key, *allowed, *([repr(shown)] if value != [] else [])):
        assert text in message, f"{text!r} not in {message!r}"


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_its_preset(method):
    options = QuadsOptions.from_dict({"method": method}, SOURCE)
    assert options.preset == method
    assert options.compensation == CompensationOptions.from_preset(method)
    assert options.compensates == (method != "nvfp4")


def test_the_default_method_follows_act():
    assert QuadsOptions().preset == "quads"
    assert QuadsOptions(act="bf16").preset == "nvfp4"


def test_knobs_replace_the_presets_values():
    raw = {"method": "quads_splice", "rac_ratio": 0.25, "compensate": ["w13"]}
    found = QuadsOptions.from_dict(raw, SOURCE).compensation
    assert (found.rac_ratio, found.splice_count_w13, found.compensate) == (0.25, 64, ("w13",))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"act": "bf16", "method": "quads"}, "method 'quads' compensates quantized activations"),
        ({"act": "bf16", "rac_ratio": 0.5}, "method 'nvfp4' with {'rac_ratio': 0.5} compensates"),
        ({"method": "nvfp4", "adaptive": True}, "adaptive true is not allowed with rac_ratio 0"),
        ({"method": "nvfp4", "selection_file": "x"}, "selection_file 'x' is not allowed with"),
        (
            {"method": "nvfp4", "rac_ratio": 0.5},
            "method 'nvfp4' with {'rac_ratio': 0.5} is not allowed: 'nvfp4' compensates nothing; "
            "use one of ['quads', 'foursight', 'quads_splice']",
        ),
        ({"method": "nvfp4", "splice_count_w2": 16}, "'nvfp4' compensates nothing; use one of"),
    ],
    ids=["method", "knob", "adaptive", "file", "plain with blocks", "plain with channels"],
)
def test_options_that_exclude_each_other(raw, message):
    assert message in refusal(raw)
    halves = {f"place {i}": {key: value} for i, (key, value) in enumerate(raw.items())}
    with pytest.raises(ValueError, match="place 0, place 1: ") as error:
        merge_options(halves)
    assert message in str(error.value)


def test_pairs_are_judged_when_all_places_are_known():
    places = {"a": {"adaptive": True, "method": "foursight"}, "b": {"rac_ratio": 0.25}}
    assert merge_options(places).compensation.adaptive


def test_knobs_that_compensate_nothing_stand_beside_the_plain_method():
    """So that one file of options can be tried with another method."""
    options = QuadsOptions.from_dict({"method": "nvfp4", "min_tokens": 8, "rac_ratio": 0}, SOURCE)
    assert not options.compensates


@pytest.mark.parametrize(
    "key", ["acts", "Method", "rac_ration", "weight_bits", "knobs", "preset", ""]
)
def test_from_dict_refuses_an_unknown_key(key):
    message = refusal({"act": "bf16", key: 1})
    for text in (repr(key), *ALL_KEYS):
        assert text in message, f"{text!r} not in {message!r}"


@pytest.mark.parametrize("method", ["fp8", "modelopt", None], ids=str)
def test_from_dict_refuses_another_quant_method(method):
    message = refusal({"quant_method": method})
    for text in ("quant_method", repr(method), QUANT_METHOD):
        assert text in message, f"{text!r} not in {message!r}"


def test_defaults():
    options = QuadsOptions.from_dict({}, SOURCE)
    assert (
        options == QuadsOptions() == QuadsOptions.from_dict({"quant_method": QUANT_METHOD}, SOURCE)
    )
    assert (options.method, options.act, options.targets) == (None, "nvfp4", ("auto",))
    assert (options.ignore, options.global_scale_rule, options.backend) == ((), "pow2", "auto")
    assert options.placement == Placement(("auto",), ())


@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_from_dict_takes_a_string_for_a_list_of_one(key):
    assert getattr(QuadsOptions.from_dict({key: "lm_head"}, SOURCE), key) == ("lm_head",)


def test_from_dict_round_trip():
    raw = {
        "method": "quads",
        "act": "nvfp4",
        "targets": ["experts", "re:.*q_proj"],
        "ignore": ["model.layers.0"],
        "global_scale_rule": "te",
        "backend": "emulated",
        "selection_file": "s.safetensors",
        "rac_ratio": 0.25,
        "compensate": ["w13", "w2"],
    }
    options = QuadsOptions.from_dict(raw, SOURCE)
    assert options.placement == Placement(("experts", "re:.*q_proj"), ("model.layers.0",))
    assert json.loads(json.dumps(options.to_dict())) == raw
    assert QuadsOptions.from_dict(options.to_dict(), SOURCE) == options


def test_from_dict_leaves_its_input_alone():
    raw = {"quant_method": QUANT_METHOD, "targets": ["auto"], "act": "bf16"}
    QuadsOptions.from_dict(raw, SOURCE)
    assert raw == {"quant_method": QUANT_METHOD, "targets": ["auto"], "act": "bf16"}


def test_options_are_frozen():
    with pytest.raises(FrozenInstanceError):
        QuadsOptions().act = "bf16"


@pytest.mark.parametrize("value", [None, "", "  \n"], ids=repr)
def test_read_environment_options_of_nothing(value):
    assert read_environment_options("VLLM_QUADS_CONFIG", value) == {}


def test_read_environment_options_takes_json_or_a_path(tmp_path):
    raw = {"act": "bf16", "ignore": ["lm_head"]}
    path = tmp_path / "quads.json"
    path.write_text(json.dumps(raw))
    assert read_environment_options("VLLM_QUADS_CONFIG", " " + json.dumps(raw)) == raw
    assert read_environment_options("VLLM_QUADS_CONFIG", str(path)) == raw


def bad_files(folder) -> dict[str, str]:
    contents = {"list": b"[1]", "no-json": b"act: bf16", "binary": b"\xff\xfe{", "empty": b""}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {name: str(folder / name) for name in contents}


@pytest.mark.parametrize(
    "value",
    ['{"act": }', '{"act": "bf16"', "/nowhere/quads.json", "[1]", "bf16", "{} {}", "x" * 300],
    ids=lambda v: v[:12],
)
def test_read_environment_options_refuses(value):
    with pytest.raises(ValueError, match="SGLANG_QUADS_CONFIG"):
        read_environment_options("SGLANG_QUADS_CONFIG", value)


@pytest.mark.parametrize("kind", ["list", "no-json", "binary", "empty", "folder"])
def test_read_environment_options_refuses_a_file_without_an_object(kind, tmp_path):
    path = {**bad_files(tmp_path), "folder": str(tmp_path)}[kind]
    with pytest.raises(ValueError, match="VLLM_QUADS_CONFIG"):
        read_environment_options("VLLM_QUADS_CONFIG", path)
