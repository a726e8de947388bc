"""The wheel holds exactly the four import packages, each with every source file."""

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TREES = {
    "quads_common": "common/quads_common",
    "quads_trainers": "common/quads_trainers",
    "vllm_quads": "vllm_quads",
    "sglang_quads": "sglang_quads",
}
BUILD_INPUTS = ["pyproject.toml", "README.md", "LICENSE", *TREES.values()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build from a copy: building in the checkout leaves a build/ that later wheels would ship."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in BUILD_INPUTS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name)
        else:
            shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, source]
    subprocess.run([sys.executable, *command], check=True)
    (path,) = out.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_wheel_contents(wheel):
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {
        f"{package}/{path.relative_to(ROOT / tree).as_posix()}"
        for package, tree in TREES.items()
        for path in (ROOT / tree).rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert shipped == expected


def test_wheel_metadata(wheel):
    files = {name.partition(".dist-info/")[2]: name for name in wheel.namelist()}
    assert "licenses/LICENSE" in files
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(files["entry_points.txt"]).decode())
    assert dict(entry_points["vllm.general_plugins"]) == {"quads_nvfp4": "vllm_quads:register"}
    assert dict(entry_points["sglang.srt.plugins"]) == {"quads_nvfp4": "sglang_quads:register"}
    assert dict(entry_points["verl.plugins"]) == {"quads_nvfp4": "quads_trainers.verl"}
    metadata = wheel.read(files["METADATA"]).decode()
    assert "\nLicense-Expression: Apache-2.0\n" in metadata


def test_checkout_holds_no_stale_build():
    """setuptools ships what a build/ in the checkout holds, deleted files included."""
    assert not (ROOT / "build").exists(), "run `make clean`"
