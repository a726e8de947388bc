"""Make the virtual environment in which SGLang's CPU path runs and is tested.

SGLang's wheel is pure Python but asks for CUDA packages. On a CPU it runs without them, with
``SGLANG_USE_CPU_ENGINE=1`` (the tests and the demo set it); what is special is all here:

1. torch comes first, in the build that the index offers, then triton and sglang without their
   dependencies, then what SGLang imports when it serves text (``tools/sglang-cpu.txt``, pinned).
   ``pip check`` complains of the rest.
2. torchvision is replaced by a stub that can be imported and raises when it is called
   (``tools/stubs/torchvision``). SGLang imports the real one at start, for images, and the usual
   wheels are CUDA builds that do not load beside a CPU torch.

Nothing else is replaced: no part of SGLang, and nothing that computes with text. With a GPU, run
``pip install .[sglang]`` beside a normal SGLang instead: nothing here applies there.

Needs the standard library only. Safe to run again: a stamp in the environment holds a hash of
everything that went into it, and an equal stamp ends the run at once.
"""

import argparse
import hashlib
import shutil
import sys
import time
from pathlib import Path

from setup_cpu_env import (
    ROOT,
    STAMP,
    TORCH,
    capture,
    check_python,
    create_venv,
    pip,
    say,
)

TRITON = "triton==3.7.1"
DEFAULT_ENGINE = "0.5.15.post1"
TOOLS = Path(__file__).resolve().parent
REQUIREMENTS = TOOLS / "sglang-cpu.txt"
STUB = TOOLS / "stubs" / "torchvision"


def main() -> None:
    """Create or complete the environment, unless its stamp says that nothing changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-sglang", help="%(default)s")
    arguments = parser.parse_args()
    check_python()
    venv = arguments.venv.absolute()
    stamp, digest = venv / STAMP, inputs_digest(venv)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    install(create_venv(venv))
    stamp.write_text(digest)
    say(f"{venv} is ready after {time.monotonic() - start:.0f} s")


def inputs_digest(venv: Path) -> str:
    """Hash what the environment depends on; the paths too, since scripts in it hold them."""
    files = [Path(__file__), TOOLS / "setup_cpu_env.py", REQUIREMENTS, STUB / "__init__.py"]
    parts = [path.read_bytes() for path in [*files, ROOT / "pyproject.toml"]]
    parts += [str(x).encode() for x in (ROOT, venv, sys.version)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def install(python: Path) -> None:
    """Install everything, the large and rarely changed things first."""
    say(f"installing {TORCH} (this and the next two steps take minutes the first time)")
    pip(python, "install", TORCH)
    say(f"installing sglang {DEFAULT_ENGINE} and {TRITON}")
    pip(python, "install", "--no-deps", TRITON, f"sglang=={DEFAULT_ENGINE}")
    say("installing what sglang imports")
    pip(python, "install", "--no-warn-conflicts", "-r", REQUIREMENTS)
    site = Path(capture(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    if any(site.glob("torchvision-*.dist-info")):
        pip(python, "uninstall", "--yes", "torchvision")
    shutil.copytree(STUB, site / "torchvision", dirs_exist_ok=True)

    say("installing this project and its development tools")
    # setuptools is a dependency of torch: no isolated build environment has to be made.
    options = ["--no-warn-conflicts", "--no-build-isolation", "--editable"]
    pip(python, "install", *options, f"{ROOT}[dev]")


if __name__ == "__main__":
    main()
