"""Most of these tests need the environment of tools/setup_trainer_env.py: `make test-trainers`."""

import importlib.util
from pathlib import Path

import pytest

NEEDED = ("trl", "verl", "openrlhf", "vllm")
RUN_ANYWHERE = ("test_shared.py", "test_slime.py")


def pytest_collection_modifyitems(items):
    """Skip, with a reason, what lies in this folder."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        reason = pytest.mark.skip(reason=f"needs {', '.join(missing)}: make test-trainers")
        for item in items:
            path = Path(item.fspath)
            if path.parent == Path(__file__).parent and path.name not in RUN_ANYWHERE:
                item.add_marker(reason)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    """What a user may have set must not decide."""
    for name in ("VLLM_QUADS_CONFIG", "VLLM_QUADS_TIM"):
        monkeypatch.delenv(name, raising=False)
