"""What the plug-ins share; needs no trainer."""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from quads_trainers import rollout_environment, sync_check
from quads_trainers.filter_environment import filter_options
from quads_trainers.late_patches import patch_when_imported


def test_a_patch_runs_after_the_module_and_once(tmp_path, monkeypatch):
    (tmp_path / "patched_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    patch_when_imported("patched_later", lambda module: seen.append(module.value))
    patch_when_imported("patched_later", lambda module: setattr(module, "value", 2))
    assert seen == []
    module = importlib.import_module("patched_later")
    assert (seen, module.value, module.__spec__.name) == ([1], 2, "patched_later")
    patch_when_imported("patched_later", lambda module: seen.append(module.value))
    assert seen == [1, 2]


def test_a_patch_outlives_a_probe_and_a_failed_import(tmp_path, monkeypatch):
    (tmp_path / "probed_first.py").write_text("import os\nvalue = int(os.environ['VALUE'])\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = []
    patch_when_imported("probed_first", lambda module: seen.append(module.value))
    assert importlib.util.find_spec("probed_first") is not None
    with pytest.raises(KeyError):
        importlib.import_module("probed_first")
    assert seen == []
    monkeypatch.setenv("VALUE", "7")
    importlib.import_module("probed_first")
    assert seen == [7]


def test_an_sglang_without_plugins_is_left_alone(tmp_path, monkeypatch):
    from quads_trainers.verl import load_sglang_plugins_first

    class ServerArgs:
        def __init__(self, model):
            self.model = model

        @staticmethod
        def add_cli_args(parser):
            return parser

    package = tmp_path / "sglang" / "srt"
    package.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    (package / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    load_sglang_plugins_first(SimpleNamespace(ServerArgs=ServerArgs))
    assert ServerArgs("m").model == "m" and ServerArgs.add_cli_args(3) == 3
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)


def test_importing_the_plugin_loads_no_trainer():
    code = (
        "import sys, quads_trainers.verl, quads_trainers.openrlhf, quads_trainers.slime\n"
        "loaded = {'verl', 'openrlhf', 'slime', 'vllm', 'sglang', 'trl'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | _path())


def _path():
    return {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def test_rollout_method_is_switched_on_inside_the_block(monkeypatch):
    monkeypatch.delenv(rollout_environment.VARIABLE, raising=False)
    with rollout_environment.rollout_method({"act": "bf16"}):
        raw = json.loads(os.environ[rollout_environment.VARIABLE])
        # No pattern: offline vLLM replaces a hub id by the path of its snapshot.
        assert raw == {"enable": True, "act": "bf16"}
        assert rollout_environment.environment_options() == {"act": "bf16"}
        with (
            pytest.raises(ValueError, match="set already"),
            rollout_environment.rollout_method({}),
        ):
            pass
    assert rollout_environment.VARIABLE not in os.environ
    with (
        pytest.raises(ValueError, match="unknown option"),
        rollout_environment.rollout_method({"x": 1}),
    ):
        pass
    monkeypatch.setenv(rollout_environment.VARIABLE, "")
    with rollout_environment.rollout_method({}):
        pass
    assert os.environ[rollout_environment.VARIABLE] == ""


@pytest.mark.parametrize("value", ['{"act": "nvfp4"}', '{"enable": false}', '{"enable": 1}'])
def test_a_variable_that_switches_nothing_on_is_refused(monkeypatch, value):
    monkeypatch.setenv(rollout_environment.VARIABLE, value)
    with pytest.raises(ValueError, match="the engine would stay BF16"):
        rollout_environment.check_enabled()


def test_filter_options_from_the_environment(monkeypatch, tmp_path):
    assert filter_options() is None
    monkeypatch.setenv("VLLM_QUADS_TIM", "{}")
    assert filter_options().k3 == 0.01
    (tmp_path / "tim.json").write_text('{"k3": 0.5}')
    monkeypatch.setenv("VLLM_QUADS_TIM", str(tmp_path / "tim.json"))
    assert filter_options().k3 == 0.5


def test_check_in_sync_names_what_differs(monkeypatch):
    served = {"a": "1", "b": "2"}
    monkeypatch.setattr(sync_check, "fingerprints", lambda model: {"a": "1", "b": "3", "c": "4"})
    monkeypatch.setattr(sync_check, "engine_fingerprints", lambda engine: served)
    with pytest.raises(sync_check.WeightsDifferError, match=r"2 of 3 .*: b, c"):
        sync_check.check_in_sync(None, None)
    monkeypatch.setattr(sync_check, "fingerprints", lambda model: dict(served))
    assert sync_check.check_in_sync(None, None) == 2
