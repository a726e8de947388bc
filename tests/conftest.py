"""What every test gets: a fixed seed, poisoned fresh memory, a skip where hardware is missing."""

import functools
import importlib.util
import os
import sys

import pytest
import torch

# For every engine that a test starts: little memory, no network.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

OUR_PACKAGES = {"quads_common", "quads_trainers", "vllm_quads", "sglang_quads"}
ALLOCATORS = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
]


def pytest_collection_modifyitems(items):
    """Skip what cannot run here, and say why."""
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA GPU"
    if importlib.util.find_spec("vllm") is None:
        missing["engine"] = "needs vLLM"
    for item in items:
        for marker in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[marker]))


@pytest.fixture(autouse=True)
def seed():
    """Make every test's random numbers its own, whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fill what our packages allocate uninitialized, so that no code can pass by reading it.

    torch has a switch for this (``use_deterministic_algorithms``), but it also selects other
    algorithms, and a test of "same bits in any batch" would then pass for the wrong reason.
    """
    for owner, name in ALLOCATORS:
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


def poisoning(allocate):
    """Wrap an allocator so that calls from our packages return poisoned memory."""

    @functools.wraps(allocate)
    def wrapper(*args, **kwargs):
        fresh = allocate(*args, **kwargs)
        if torch.compiler.is_compiling():  # dynamo can't trace the look at the caller
            return fresh
        caller = sys._getframe(1).f_globals.get("__name__", "")
        return poison(fresh) if caller.partition(".")[0] in OUR_PACKAGES else fresh

    return wrapper


@torch.no_grad()
def poison(fresh):
    """Write NaN, or 0xFF into bytes (packed codes and 8-bit floats), or the largest integer."""
    if fresh.dtype == torch.bool:
        return fresh.fill_(True)
    if fresh.dtype.itemsize == 1:
        fresh.view(torch.uint8).fill_(0xFF)
        return fresh
    if fresh.is_floating_point() or fresh.is_complex():
        return fresh.fill_(float("nan"))
    return fresh.fill_(torch.iinfo(fresh.dtype).max)
