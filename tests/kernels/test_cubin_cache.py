"""The folder of compiled CUDA C++ kernels: what is kept, damaged files, folders that refuse."""

import logging
import os

import pytest

from quads_common.kernels.cuda import cubin_cache
from quads_common.kernels.cuda.cubin_cache import CACHE_VARIABLE, cached_cubin

NAME = "moe-sm_90a-0123.cubin"
CUBIN = b"\x7fELF" + bytes(range(256))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cubins"))
    cubin_cache._warn_not_kept.cache_clear()
    return tmp_path / "cubins"


def again() -> bytes:
    raise AssertionError("compiled again")


def test_files_are_read_back(folder, caplog):
    assert cached_cubin(NAME, lambda: CUBIN) == CUBIN
    assert cached_cubin(NAME, again) == CUBIN
    assert [file.name for file in folder.iterdir()] == [NAME]
    assert (folder / NAME).read_bytes()[: len(CUBIN)] == CUBIN  # tools for cubins can read it
    assert not caplog.records


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:16],
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: content[:-32],
        lambda content: content.replace(b"ELF", b"elf"),
    ],
    ids=["empty", "short", "cut", "longer", "without digest", "changed"],
)
def test_damaged_files_are_replaced(folder, damage):
    cached_cubin(NAME, lambda: CUBIN)
    whole = (folder / NAME).read_bytes()
    (folder / NAME).write_bytes(damage(whole))
    assert cached_cubin(NAME, lambda: CUBIN) == CUBIN
    assert (folder / NAME).read_bytes() == whole


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_have_the_permissions_of_the_umask(folder, umask, mode):
    before = os.umask(umask)
    try:
        cached_cubin(NAME, lambda: CUBIN)
    finally:
        os.umask(before)
    assert (folder / NAME).stat().st_mode & 0o777 == mode
    assert folder.stat().st_mode & 0o777 == 0o777 & ~umask


def refuse(*args):
    raise PermissionError(13, "Permission denied")


def under_a_file(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    return tmp_path / "file"


def under_a_home_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc/nonexistent")
    return "/proc/nonexistent/.cache/quads_nvfp4"


def without_a_home(tmp_path, monkeypatch):
    """A user that the machine does not know, as in many containers."""
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    return "~/.cache/quads_nvfp4"


def in_a_read_only_folder(tmp_path, monkeypatch):
    (tmp_path / "cubins").mkdir(mode=0o555)
    if os.geteuid() == 0:  # who may write there
        monkeypatch.setattr(cubin_cache, "open", refuse, raising=False)
    return tmp_path / "cubins"


def without_room(tmp_path, monkeypatch):
    """Everything works but for the last step."""
    monkeypatch.setattr(os, "replace", refuse)
    return tmp_path / "cubins"


@pytest.mark.parametrize(
    "prepare",
    [
        under_a_file,
        under_a_home_that_is_not_there,
        without_a_home,
        in_a_read_only_folder,
        without_room,
    ],
)
def test_folders_that_refuse_are_told_once(folder, tmp_path, monkeypatch, caplog, prepare):
    where = prepare(tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO, logger="quads_common"):
        for name in (NAME, "other.cubin"):
            assert cached_cubin(name, lambda: CUBIN) == CUBIN
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "quads_common.kernels.cuda.cubin_cache"
    assert str(where) in record.getMessage() and CACHE_VARIABLE in record.getMessage()
    assert "the next process will compile them again" in record.getMessage()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert kept == ([where] if prepare is under_a_file else [])  # and no temporary files


def test_files_that_cannot_be_read_are_replaced(folder):
    folder.mkdir()
    (folder / NAME).symlink_to(folder / NAME)  # a circle: nobody can read it
    assert cached_cubin(NAME, lambda: CUBIN) == CUBIN
    assert cached_cubin(NAME, again) == CUBIN


def test_a_build_that_fails_leaves_nothing(folder):
    with pytest.raises(AssertionError, match="compiled again"):
        cached_cubin(NAME, again)
    assert not folder.exists()
