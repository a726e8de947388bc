"""Calibration of an SGLang engine that is none: prompts, and what a failure is followed by."""

from types import SimpleNamespace

import pytest

from sglang_quads import calibrate as module
from sglang_quads.calibrate import calibrate


@pytest.fixture
def engine(monkeypatch):
    """Notes what it is asked; a prompt with "bad" in it fails."""
    calls = []

    def ask(engine, name, *path):
        calls.append(name)
        return [{"calibration_passes": 1, "applied": True, "metrics": []}]

    def generate(prompts, params):
        calls.append(prompts)
        if "bad" in prompts:
            raise ValueError("the engine does not like it")

    monkeypatch.setattr(module, "ask", ask)
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    manager = SimpleNamespace(tokenizer=tokenizer, context_len=8)
    return SimpleNamespace(
        calls=calls, tokenizer_manager=manager, generate=generate, flush_cache=lambda: True
    )


@pytest.mark.parametrize(
    "prompts, message",
    [
        ("a text", "prompts 'a text' is not allowed: a list of prompts"),
        ([], "prompts is empty"),
        (["a", ""], "prompt 2 '' is not allowed: a text, not empty"),
        ([5], "prompt 1 5 is not allowed: a text"),
        ([[1, 2]], r"prompt 1 \[1, 2\] is not allowed: a text"),
        (["a", "12345678"], "prompt 2 has 8 tokens: with 1 generated .* length of 8"),
    ],
    ids=str,
)
def test_what_cannot_work_forgets_nothing(engine, prompts, message):
    with pytest.raises(ValueError, match=message):
        calibrate(engine, prompts)
    assert not engine.calls


def test_what_fails_later_brings_back_what_was_forgotten(engine):
    with pytest.raises(ValueError, match="does not like it"):
        calibrate(engine, iter(["a", "bad"]))
    assert engine.calls[-3:] == ["quads_begin_calibration", ["a", "bad"], "quads_undo_calibration"]
    engine.calls.clear()
    calibrate(engine, ("1234567",))
    assert engine.calls[-1] == "quads_end_calibration"
    engine.tokenizer_manager.tokenizer = None  # --skip-tokenizer-init
    calibrate(engine, ["12345678"])
