"""What ``check_logprobs`` holds SGLang to: selections and log-probs of a vLLM engine.

    .venv/bin/python -m tests.sglang.make_vllm_files

Needs vLLM's CPU environment. For each preset an engine on arith-moe serves some problems,
refreshes, saves its selection and says the log-probs of others; a plain one says those only. Run it
again when the numbers are meant to change (the quantizer, the statistics, the selection file).
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.checkpoints import ARITH_MOE
from tests.sglang.compensated import (
    FED,
    SCORED,
    VLLM_FILES,
    heldout,
    options_of,
)
from tests.vllm.engine import run_engine


def make(preset: str, folder: Path) -> None:
    """Write the selection file and the log-probs of a preset."""
    sequences = heldout()
    path = VLLM_FILES / f"{preset}.safetensors"
    options = options_of(preset)
    selection = [
        ("fed", "generate", [sequences[FED], 5]),
        ("refreshed", "refresh", []),
        ("synced", "reload", [str(ARITH_MOE)]),  # which brings BF16 columns into force
        ("saved", "save", [str(path)]),
    ]
    probes = [
        *(selection if preset != "nvfp4" else ()),
        ("logprobs", "logprobs", [sequences[SCORED]]),
    ]
    found = run_engine(
        folder / preset,
        ARITH_MOE,
        probes,
        quantization="quads_nvfp4",
        additional_config={"quads": options},
    )
    logprobs = torch.cat(found["logprobs"])  # one tensor: a name for each sequence is larger
    header = {"options": json.dumps(options)}
    save_file({"logprobs": logprobs}, VLLM_FILES / f"{preset}-logprobs.safetensors", header)


def main() -> None:
    """Make all, or those that the command line names."""
    VLLM_FILES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for preset in sys.argv[1:] or ("nvfp4", "quads", "quads_splice", "foursight"):
            make(preset, Path(folder))


if __name__ == "__main__":
    main()
