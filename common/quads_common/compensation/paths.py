"""Paths of selection files: what may be read and replaced, and errors that name the user's path."""

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

__all__ = ["absolute", "check_readable", "path_text", "probe", "write_whole"]

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def path_text(path: object) -> str:
    """A path as text, as it is sent to an engine.

    Raises:
        ValueError: it is neither a text nor an ``os.PathLike``, it is blank or holds NUL.
    """
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"path {path!r:.200} is not allowed: a str or os.PathLike, not blank")
    if "\0" in text:
        raise ValueError(f"path {path!r:.200} is not allowed: it holds NUL, which no path can")
    return text


def absolute(path: str | os.PathLike[str]) -> str:
    """What messages and answers show; links stay as they are.

    Raises:
        ValueError: see ``path_text``.
    """
    return os.path.abspath(path_text(path))


def check_readable(path: str | os.PathLike[str]) -> None:
    """Raise ``OSError`` unless this is a regular file that can be opened; the message names it."""
    shown = absolute(path)
    try:
        _check_regular(os.stat(shown))
        with open(shown, "rb"):
            pass
    except OSError as error:
        raise _named(error, f"{shown} cannot be read") from None


def write_whole(path: str | os.PathLike[str], write: Callable[[Path], None]) -> None:
    """Let ``write`` make a file beside the path, then put it there: whole or not at all.

    A link is kept, and what it leads to replaced. The file's mode is what the umask gives.

    Raises:
        OSError: it cannot be written, or what is there is no regular file; the message names the
            path.
    """
    shown = absolute(path)
    try:
        target = _target(shown)
        temporary = _beside(target)
        try:
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            temporary.chmod(mode)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise _named(error, f"{shown} cannot be written") from None


def probe(path: str | os.PathLike[str]) -> None:
    """Raise what ``write_whole`` would, as far as that can be known; leaves nothing."""
    shown = absolute(path)
    try:
        temporary = _beside(_target(shown))
        temporary.touch()
        temporary.unlink()
    except OSError as error:
        raise _named(error, f"{shown} cannot be written") from None


def _beside(target: str) -> Path:
    return Path(f"{target}.partial-{os.getpid()}")


def _target(shown: str) -> str:
    """What to replace: the end of a chain of links, which need not exist."""
    with contextlib.suppress(FileNotFoundError):
        _check_regular(os.stat(shown))
    return os.path.realpath(shown)


def _check_regular(found: os.stat_result) -> None:
    """Raise ``OSError`` that says what it is, if it is no regular file."""
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(f"it is {kind}, expected a regular file")


def _named(error: Exception, what: str) -> OSError:
    reason = getattr(error, "strerror", None) or str(error)
    kind = type(error) if isinstance(error, OSError) else OSError
    return kind(f"{what}: {reason}")
