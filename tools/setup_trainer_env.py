"""Make the virtual environment in which the RL trainers' own code is tested on a CPU.

TRL and verl as released, beside vLLM's CPU build:

* vLLM 0.32.0: older CPU wheels have no router kernel for a quantized MoE. verl 0.9.1 accepts 0.18
  and newer; TRL 1.16.0 warns above 0.31.
* transformers is what that vLLM wants, 5.16.1 or newer. verl's requirement says less than 5.11, so
  verl is installed without its dependencies and they are installed beside it, less that one.
* OpenRLHF comes without its dependencies (DeepSpeed, flash-attn and bitsandbytes are CUDA
  builds), so that its loss can be run; its Ray actors cannot.

Needs the standard library only. What is said in ``setup_cpu_env.py`` holds here too.
"""

import argparse
import hashlib
import time
from pathlib import Path

import setup_cpu_env
from setup_cpu_env import ROOT, STAMP, create_venv, pip, say

ENGINE = setup_cpu_env.DEFAULT_ENGINE
TRANSFORMERS = "transformers==5.19.0"
TRAINERS = ("trl==1.16.0", "matplotlib")
WITHOUT_DEPENDENCIES = ("verl==0.9.1", "openrlhf==0.11.2")


def main() -> None:
    """Create or complete the environment, unless its stamp says that nothing changed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--venv", type=Path, default=ROOT / ".venv-trainers", help="default: %(default)s"
    )
    venv = parser.parse_args().venv.absolute()
    setup_cpu_env.check_python()
    stamp, digest = venv / STAMP, inputs_digest(venv)
    if stamp.is_file() and stamp.read_text() == digest:
        return
    stamp.unlink(missing_ok=True)
    start = time.monotonic()
    python = create_venv(venv)
    setup_cpu_env.install(python, ENGINE)
    trainers = [f"torch=={installed_torch(python)}", TRANSFORMERS, *TRAINERS]
    say(f"installing {', '.join([*TRAINERS, *WITHOUT_DEPENDENCIES])} and what they depend on")
    pip(python, "install", "--no-deps", *WITHOUT_DEPENDENCIES)
    pip(python, "install", "--no-warn-conflicts", *trainers, *verl_requirements(python))
    stamp.write_text(digest)
    print(f"setup: {venv} is ready after {time.monotonic() - start:.0f} s", flush=True)


def inputs_digest(venv: Path) -> str:
    """Hash what the environment depends on."""
    own = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return setup_cpu_env.inputs_digest(venv, f"{ENGINE} {own}")


def verl_requirements(python: Path) -> list[str]:
    """Return what verl depends on, less transformers and its extras."""
    code = "import importlib.metadata as m; print(*m.requires('verl'), sep='\\n')"
    lines = setup_cpu_env.capture(python, code).splitlines()
    return [x for x in lines if "extra ==" not in x and not x.startswith("transformers")]


def installed_torch(python: Path) -> str:
    """Return the version of torch in the environment, which the trainers must leave alone."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return setup_cpu_env.capture(python, code)


if __name__ == "__main__":
    main()
