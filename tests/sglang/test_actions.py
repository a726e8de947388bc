"""Actions of ``check_weights`` that cannot be answered: who refuses them, and what is allowed."""

import pytest
from torch import nn

pytestmark = pytest.mark.sglang


@pytest.fixture
def answer(monkeypatch):
    """``actions.answer`` on the one rank of a model that has no quads_nvfp4."""
    from types import SimpleNamespace

    from sglang_quads import actions, sync

    for module in (actions, sync):
        monkeypatch.setattr(module, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    return lambda action: actions.answer(nn.Module(), action)


@pytest.mark.parametrize("action", ["quads_reprot", "quads_", "quads_save /tmp/x"])
def test_an_unknown_action_says_which_are_allowed(answer, action):
    from sglang_quads import actions

    assert actions.is_ours(action)
    with pytest.raises(RuntimeError) as found:
        answer(action)
    message = str(found.value)
    name = action.partition(" ")[0]
    assert message.startswith(f"ValueError: action {name!r} is not allowed: one of ['quads_"), (
        message
    )
    for known in actions.ACTIONS:
        assert f"'{known}'" in message
    for known in actions.WITH_PATH:
        assert f"'{known} PATH'" in message


def test_other_actions_are_left_to_sglang():
    from sglang_quads.actions import is_ours

    for action in ("checksum", "snapshot", "quad_report", ""):
        assert not is_ours(action)


@pytest.mark.parametrize("path", ["", " ", "  ", " \t"], ids=repr)
def test_actions_with_a_path_need_one(answer, path):
    for name in ("quads_save_selection", "quads_probe_selection", "quads_load_selection"):
        with pytest.raises(RuntimeError, match=f"ValueError: {name} needs a path: {name} PATH$"):
            answer(name + path)


def test_actions_without_a_path_take_none(answer):
    with pytest.raises(RuntimeError, match="quads_report takes nothing after its name, got 'quads"):
        answer("quads_report /tmp/x")
