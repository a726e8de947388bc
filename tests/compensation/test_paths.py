"""Paths of selection files: what is replaced, what is refused, and errors that name the path."""

import os
import stat
from pathlib import Path

import pytest

from quads_common.compensation import read_selection_file
from quads_common.compensation.calibrate import run_passes
from quads_common.compensation.paths import absolute, path_text, probe, write_whole
from quads_common.compensation.serving import check_start_file
from quads_common.options import QuadsOptions
from sglang_quads import client
from tests.compensation.serving import loaded, options


def write(path, text="new"):
    write_whole(path, lambda file: file.write_text(text))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder that relative paths start from."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_path_is_probed_without_a_trace(here):
    probe("s")
    assert not names(here)
    Path("s").write_text("as it was")
    probe(here / "s")
    assert Path("s").read_text() == "as it was" and names(here) == ["s"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_that_the_umask_gives(here, umask, mode):
    """Whatever wrote them, and whatever was there."""
    Path("s").write_text("old")
    Path("s").chmod(0o600)

    def secret(file):
        file.unlink()
        file.touch(0o600)

    before = os.umask(umask)
    try:
        write_whole("s", secret)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat("s").st_mode) == mode and names(here) == ["s"]


def test_links_are_kept_and_their_targets_replaced(here):
    Path("folder").mkdir()
    Path("link").symlink_to("folder/file")
    for text in ("first", "second"):
        write("link", text)
        assert Path("link").is_symlink() and Path("folder/file").read_text() == text
    assert names(here) == ["folder", "link"] and names(here / "folder") == ["file"]


def test_what_is_no_regular_file_is_neither_replaced_nor_read(here):
    Path("folder").mkdir()
    os.mkfifo("fifo")
    for path in ("fifo", "folder"):
        Path(f"to {path}").symlink_to(path)
    Path("to device").symlink_to("/dev/null")
    there = names(here)
    for name, kind in (("folder", "a folder"), ("fifo", "a FIFO"), ("device", "a device")):
        for path in (f"to {name}", *([name] if name != "device" else [])):
            for call, done in (
                (write, "written"),
                (probe, "written"),
                (read_selection_file, "read"),
            ):
                message = f"^{here}/{path} cannot be {done}: it is {kind}, expected a regular file$"
                with pytest.raises(OSError, match=message):
                    call(path)
    assert names(here) == there and stat.S_ISFIFO(os.stat("fifo").st_mode)


def test_errors_name_the_path_that_was_given(here):
    """As an absolute one, and not that of a temporary file."""
    Path("loop").symlink_to("loop")
    Path("file").touch()
    long = "n" * 300
    for path, reason in (
        ("absent/s", "No such file or directory"),
        ("loop", "Too many levels of symbolic links"),
        ("file/s", "Not a directory"),
        (long, "File name too long"),
    ):
        for call, done in ((write, "written"), (probe, "written"), (read_selection_file, "read")):
            with pytest.raises(OSError, match=f"^{here}/{path} cannot be {done}: {reason}$"):
                call(path)
    assert names(here) == ["file", "loop"]
    with pytest.raises(FileNotFoundError, match=f"^{here}/s cannot be read: No such file"):
        read_selection_file("s")
    Path("s").write_text("no safetensors")
    with pytest.raises(ValueError, match=f"^{here}/s is not a selection file"):
        read_selection_file("s")
    with pytest.raises(ValueError) as found:
        check_start_file(QuadsOptions(selection_file="s"), 1)
    assert str(found.value).startswith(f"selection_file cannot be used: {here}/s is not a")
    assert str(found.value).count(f"{here}/s") == 1, "and once"


def test_a_write_that_fails_leaves_what_was_there(here):
    def fail(file):
        file.write_text("half")
        raise OSError(28, "No space left on device", "s.partial-1")

    Path("s").write_text("old")
    with pytest.raises(OSError, match=f"^{here}/s cannot be written: No space left on device$"):
        write_whole("s", fail)
    assert Path("s").read_text() == "old" and names(here) == ["s"]


@pytest.mark.parametrize(
    "path, allowed",
    [
        *((path, "a str or os.PathLike, not blank") for path in ("", " ", "\t\n", None, 5, b"s")),
        ("a\0b", "it holds NUL, which no path can"),
    ],
    ids=repr,
)
def test_what_is_no_path_is_refused(here, path, allowed):
    for call in (path_text, absolute, write, probe, read_selection_file):
        with pytest.raises(ValueError) as found:
            call(path)
        assert str(found.value) == f"path {path!r} is not allowed: {allowed}"
    assert not names(here)


def test_paths_of_calibration_and_of_a_rank(log, here):
    """As ``os.PathLike`` and relative; answers are absolute."""
    asked = []

    def rpc(method, *args):
        asked.append(args)
        return [{"applied": True, "metrics": [], "calibration_passes": 1}]

    run_passes(rpc, lambda: None, None, Path("folder/s"))
    assert [args for args in asked if args] == [("folder/s",)] * 2
    compensator = loaded(log, options())
    assert compensator.save(Path("s"), lambda parts: [parts]) == {
        "path": str(here / "s"), "inputs": 2,
    }  # fmt: skip
    assert compensator.load(Path("s")) == {"applied": True}


def test_orders_carry_paths_as_text_and_errors_name_them_once():
    with pytest.raises(ValueError, match=r"^path 5 is not allowed"):
        client.path_text(5)
    with pytest.raises(RuntimeError, match=r"^quads_load_selection: /a b cannot be read$"):
        client.decode(
            "quads_load_selection /a b", {"success": False, "message": "/a b cannot be read"}
        )
