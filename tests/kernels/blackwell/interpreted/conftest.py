"""These tests need a process of their own: Triton reads TRITON_INTERPRET when it is imported."""

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.kernels.blackwell import interpreter_fp4

    interpreter_fp4.apply()
else:
    collect_ignore_glob = ["test_*.py"]
