"""Limits on the files of this repository."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_BYTES = 16 * 2**20  # a run on a GPU machine carries the whole checkout
MAX_MODULE_LINES = 450
# A file is named after what it holds.
VAGUE_NAMES = {"utils.py", "util.py", "helpers.py", "helper.py", "misc.py"}


@pytest.fixture(scope="module")
def files():
    """Files that are tracked, or will be: not yet added and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("needs git")
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    # A file that was deleted but not yet committed is still listed.
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_repository_is_small(files):
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in files}
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:5]
    total = sum(sizes.values())
    assert 0 < total < MAX_BYTES, f"{total} bytes of {MAX_BYTES}; the largest files: {largest}"


def test_file_names_say_something(files):
    assert not [path for path in files if path.name in VAGUE_NAMES]


def test_modules_are_short(files):
    lengths = {path: path.read_text().count("\n") for path in files if path.suffix == ".py"}
    assert lengths
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_MODULE_LINES}
