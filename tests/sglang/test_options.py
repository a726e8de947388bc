"""Option errors and the environment variable: up to SGLang's configuration.

Nothing here starts an engine: building ``ServerArgs`` is what every way of starting SGLang does
first, in the process that the user sees. Each case runs in a process of its own where plugins load
as they do for a user.
"""

import json
import subprocess
import sys

import pytest

from tests.sglang.engine import environment
from tests.sglang.server_args import BASE, server_args

pytestmark = pytest.mark.sglang

OPTION_ERRORS = {
    "unknown key": ({"rac_ration": 0.5}, "unknown option 'rac_ration'; allowed are ['method', "),
    "act": ({"act": "int4"}, "act 'int4' is not allowed: one of ['nvfp4', 'bf16']"),
    "method": ({"method": "best"}, "method 'best' is not allowed"),
    "knob": ({"rac_ratio": 2}, "rac_ratio"),
    "rule": ({"global_scale_rule": "max"}, "global_scale_rule 'max' is not allowed"),
    "backend": ({"backend": "marlin"}, "backend 'marlin' is not allowed: one of ['auto', "),
    "targets type": ({"targets": 3}, "targets must be a string or a list of strings, got 3"),
    "no targets": ({"targets": []}, "targets is empty"),
    "compensation without act": (
        {"method": "quads", "act": "bf16"},
        "method 'quads' compensates quantized activations, and act 'bf16' quantizes none",
    ),
    "file without method": (
        {"method": "nvfp4", "selection_file": "f"},
        "selection_file 'f' is not allowed with method 'nvfp4'",
    ),
    "sampling rate": ({"sampling_rate": 0}, "sampling_rate 0 is not allowed"),
    "regex": ({"ignore": ["re:("]}, "ignore: 're:(' is not a regular expression"),
}


def override(options):
    return {"json_model_override_args": json.dumps({"quantization_config": options})}


def cases():
    """(arguments, environment) of everything that this file asks, by name."""
    found = {}
    for name, (options, _) in OPTION_ERRORS.items():
        found[f"override, {name}"] = (override(options), None)
        found[f"environment, {name}"] = ({}, options)
    options = {"act": "bf16", "ignore": "re:.*layers\\.0\\..*"}
    found["override"] = (override(options), None)
    found["environment"] = ({}, options)
    for method in ("quads", "foursight", "quads_splice"):
        found[f"compensation, {method}"] = (override({"method": method, "ema": 0.5}), None)
    found["conflict"] = (override({"act": "nvfp4"}), {"act": "bf16"})
    found["same twice"] = (override({"targets": "experts"}), {"targets": ["experts"]})
    found["method is no text"] = (override({"quant_method": None}), None)
    found["override is no object"] = ({"json_model_override_args": "[1]"}, None)
    found["foreign"] = (override({"quant_method": "compressed-tensors", "format": "nvfp4"}), None)
    found["named"] = ({"quantization": None, **override({"quant_method": "quads_nvfp4"})}, None)
    found["not an object"] = (override("bf16"), None)
    for name, variable in {
        "enable": {"enable": True},
        "enable, model matches": {"enable": True, "model": "*arith*"},
        "enable, model differs": {"enable": True, "model": "*reward*"},
        "not enabled": {"act": "bf16"},
        "enable is no boolean": {"enable": 1},
    }.items():
        found[name] = ({"quantization": None}, variable)
        if name == "not enabled":
            found["disabled"] = ({"quantization": None}, {"enable": False, "act": "bf16"})
        if name == "enable is no boolean":
            found["enable is no boolean, with the method"] = ({}, variable)
            found["model is no pattern, with the method"] = ({}, {"model": 5})
    for key, value in (("rac_ratio", 0.5), ("quads", {"method": "quads"}), ("targets", "experts")):
        arguments = {"json_model_override_args": json.dumps({key: value})}
        found[f"misplaced, {key}"] = (arguments, None)
    found["no JSON"] = ({}, "{")
    found["no file"] = ({}, "nowhere.json")
    return found


@pytest.fixture(scope="module")
def answers(arith_moe):
    """What each case says, from one process."""
    asked = {}
    for name, (arguments, variable) in cases().items():
        text = variable if isinstance(variable, str) else json.dumps(variable)
        asked[name] = {
            "arguments": {**BASE, "model_path": str(arith_moe), **arguments},
            "environment": {} if variable is None else {"SGLANG_QUADS_CONFIG": text},
        }
    return server_args(asked)


@pytest.mark.parametrize("case", OPTION_ERRORS)
@pytest.mark.parametrize("way", ["override", "environment"])
def test_option_errors(answers, way, case):
    error = answers[f"{way}, {case}"]["error"]
    source = "quantization_config" if way == "override" else "SGLANG_QUADS_CONFIG"
    assert error.startswith(f"ValueError: {source}: "), error
    assert OPTION_ERRORS[case][1] in error, error


@pytest.mark.parametrize("way", ["override", "environment"])
def test_options_arrive(answers, way):
    options = answers[way]["options"]
    assert (options["act"], options["ignore"]) == ("bf16", ["re:.*layers\\.0\\..*"])


@pytest.mark.parametrize("method", ["quads", "foursight", "quads_splice"])
def test_compensation_arrives(answers, method):
    answer = answers[f"compensation, {method}"]
    assert answer["error"] == ""
    assert (answer["options"]["method"], answer["options"]["ema"]) == (method, 0.5)
    assert answers["enable"]["error"] == ""


def test_conflicting_places(answers):
    error = answers["conflict"]["error"]
    assert "'act' is 'nvfp4' in quantization_config and 'bf16' in SGLANG_QUADS_CONFIG" in error
    assert answers["same twice"]["options"]["targets"] == ["experts"]


def test_foreign_checkpoints_are_refused(answers):
    error = answers["foreign"]["error"]
    assert "already quantized (quant_method 'compressed-tensors')" in error
    assert "takes BF16 checkpoints" in error


def test_malformed_places(answers):
    assert "quantization_config must be an object, got 'bf16'" in answers["not an object"]["error"]
    assert "must be an object, got [1]" in answers["override is no object"]["error"]
    assert "must be 'quads_nvfp4' or left out, got None" in answers["method is no text"]["error"]
    assert "SGLANG_QUADS_CONFIG is not valid JSON" in answers["no JSON"]["error"]
    assert "'nowhere.json' is neither a JSON object nor a readable" in answers["no file"]["error"]
    assert '"enable" must be true or false' in answers["enable is no boolean"]["error"]


@pytest.mark.parametrize("key", ["rac_ratio", "quads", "targets"])
def test_options_beside_their_place(answers, key):
    """SGLang puts such keys into the model's configuration, where nothing reads them."""
    error = answers[f"misplaced, {key}"]["error"]
    assert error.startswith(f"ValueError: --json-model-override-args: '{key}' has no effect there")
    assert "belong into its quantization_config" in error


def test_switches_are_checked_beside_the_flag(answers):
    for case, got in (
        ("enable is no boolean", "1 and '*'"),
        ("model is no pattern", "False and 5"),
    ):
        assert f"got {got}" in answers[f"{case}, with the method"]["error"]


def test_options_without_the_method_are_a_warning(answers):
    (warning,) = answers["not enabled"]["warnings"]
    assert warning.startswith("SGLANG_QUADS_CONFIG holds 'act', but quads_nvfp4 is not in use")
    for case in ("disabled", "enable", "environment", "enable, model differs", "named"):
        assert answers[case]["warnings"] == [], case


@pytest.mark.parametrize(
    "case, quantization",
    [
        ("enable", "quads_nvfp4"),
        ("enable, model matches", "quads_nvfp4"),
        ("enable, model differs", None),
        ("not enabled", None),
        ("named", "quads_nvfp4"),
    ],
)
def test_switching_on(answers, case, quantization):
    assert answers[case]["error"] == ""
    assert answers[case]["quantization"] == quantization


def run_python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(**variables)
    )


def test_every_hook_is_applied():
    """SGLang logs what it cannot hook and goes on; an engine would refuse to start."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang_quads import compat, hooks\n"
        "assert len(hooks.targets()) == 19, hooks.targets()\n"
        "assert not compat.missing(hooks.targets()), compat.missing(hooks.targets())\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_missing_hook_is_noticed():
    code = (
        "from sglang_quads import compat, hooks\n"
        "assert compat.missing(hooks.targets()) == hooks.targets()\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr[-2000:]


def test_preload_allows_server_args(arith_moe):
    """The documented line for trainers that build ``ServerArgs`` on their own."""
    code = (
        "{}from sglang.srt.server_args import ServerArgs\n"
        f"print(ServerArgs(model_path={str(arith_moe)!r}, quantization='quads_nvfp4', "
        "device='cpu', attention_backend='torch_native').quantization)\n"
    )
    done = run_python(code.format("import sglang_quads.preload\n"))
    assert done.stdout.strip().endswith("quads_nvfp4"), done.stderr[-2000:]
    without = run_python(code.format(""))
    assert "Unknown quantization method: quads_nvfp4" in without.stderr


def test_verl_needs_no_line(arith_moe):
    """verl imports ``quads_trainers.verl`` in each of its processes, and builds ``ServerArgs``."""
    code = (
        "import quads_trainers.verl\n"
        "import sglang.srt.entrypoints.engine\n"
        "from sglang.srt.server_args import ServerArgs\n"
        f"print(ServerArgs(model_path={str(arith_moe)!r}, quantization='quads_nvfp4', "
        "device='cpu', attention_backend='torch_native').quantization)\n"
    )
    done = run_python(code)
    assert done.stdout.strip().endswith("quads_nvfp4"), done.stderr[-2000:]


def test_plugins_can_be_left_out():
    """``SGLANG_PLUGINS`` names entry points."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import QUANTIZATION_CHOICES\n"
        "print('quads_nvfp4' in QUANTIZATION_CHOICES)\n"
    )
    assert run_python(code, SGLANG_PLUGINS="other").stdout.strip().endswith("False")
    assert run_python(code, SGLANG_PLUGINS="quads_nvfp4").stdout.strip().endswith("True")
