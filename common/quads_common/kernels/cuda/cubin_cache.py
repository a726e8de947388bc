"""Machine code on disk, so that it is compiled once on a machine and not by every process.

A file appears whole or not at all and ends with the SHA-256 of the rest, so damage is noticed.
Files and folders have the permissions that the umask gives. Where nothing can be kept, the machine
code is used all the same and a warning says so.
"""

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from functools import cache
from pathlib import Path

__all__ = ["CACHE_VARIABLE", "cached_cubin"]

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "QUADS_KERNEL_CACHE"
DIGEST_BYTES = hashlib.sha256().digest_size


def cached_cubin(name: str, build: Callable[[], bytes]) -> bytes:
    """What the file of this name holds; if it is missing or damaged, what ``build`` returns."""
    folder = _folder()
    cubin = _read(folder / name)
    if cubin is None:
        cubin = build()
        try:
            _write(folder / name, cubin)
        except OSError as error:
            _warn_not_kept(folder, error.strerror or str(error))
    return cubin


def _folder() -> Path:
    """See ``nvrtc.compile_cubin``."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(os.path.expanduser(folder))
    return Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache"), "quads_nvfp4")


def _read(file: Path) -> bytes | None:
    """None where there is no such file, or none that can be read or is whole."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    cubin, digest = content[:-DIGEST_BYTES], content[-DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _write(file: Path, cubin: bytes) -> None:
    if file.parts[0] == "~":  # expanduser leaves it
        raise FileNotFoundError(0, "this user has no home directory")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as target:
            target.write(cubin + hashlib.sha256(cubin).digest())
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@cache  # once in a process
def _warn_not_kept(folder: Path, reason: str) -> None:
    logger.warning(
        "compiled kernels cannot be kept in %s (%s): the next process will compile them again; "
        "%s names another folder",
        folder, reason, CACHE_VARIABLE,
    )  # fmt: skip
