"""Build SGLang's ``ServerArgs`` in a process where plugins load as they do for a user."""

import json
import subprocess
import sys
from typing import Any

from tests.sglang.engine import environment

# Read cases from stdin, answer with what building ServerArgs says.
SCRIPT = """
import json, logging, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
answers, warnings = {}, []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("sglang_quads").addHandler(handler)
for name, case in json.load(sys.stdin).items():
    os.environ.pop("SGLANG_QUADS_CONFIG", None)
    os.environ.update(case["environment"])
    warnings.clear()
    try:
        arguments = ServerArgs(**case["arguments"])
        options = arguments.get_model_config()
        from sglang_quads.hooks import model_section
        from sglang_quads.config import options_of
        answers[name] = {
            "error": "",
            "quantization": options.quantization,
            "options": options_of(model_section(options) or {}).to_dict(),
            "warnings": list(warnings),
        }
    except Exception as error:
        answers[name] = {"error": f"{type(error).__name__}: {error}"}
print("ANSWERS" + json.dumps(answers))
"""
BASE = {"device": "cpu", "attention_backend": "torch_native", "quantization": "quads_nvfp4"}


def server_args(cases: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each case says, from one process; a case has "arguments" and "environment"."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert "ANSWERS" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWERS")[2])
