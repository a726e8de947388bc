"""The memory poison works: without it a test could pass by reading a lucky zero."""

import pytest
import torch

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.uint8,
    torch.int32,
    torch.bool,
]
ALLOCATIONS = {
    "empty": "torch.empty(3, 4, dtype=dtype)",
    "empty_requires_grad": "torch.empty(3, 4, dtype=dtype, requires_grad=dtype == torch.float32)",
    "empty_like": "torch.empty_like(torch.zeros(3, 4, dtype=dtype))",
    "empty_strided": "torch.empty_strided((3, 4), (1, 3), dtype=dtype)",
    "new_empty": "torch.zeros(1).new_empty((3, 4), dtype=dtype)",
    "new_empty_strided": "torch.zeros(1).new_empty_strided((3, 4), (1, 3), dtype=dtype)",
}


def allocate_as(module: str, expression: str, dtype: torch.dtype) -> torch.Tensor:
    """Evaluate an allocation as if it stood in the given module."""
    return eval(expression, {"__name__": module, "torch": torch, "dtype": dtype})


def is_poisoned(x: torch.Tensor) -> bool:
    if x.dtype == torch.bool:
        return bool(x.all())
    if x.is_floating_point():
        return bool(x.float().isnan().all())
    return bool((x == torch.iinfo(x.dtype).max).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("expression", ALLOCATIONS.values(), ids=ALLOCATIONS.keys())
def test_memory_of_our_packages_is_poisoned(expression, dtype):
    assert is_poisoned(allocate_as("quads_common.anything", expression, dtype))


def test_poison_accepts_the_meta_device():
    allocate_as("vllm_quads.linear", "torch.empty(3, device='meta', dtype=dtype)", torch.uint8)


def test_memory_of_others_is_left_alone():
    """An engine in the same process allocates large buffers and may have its reasons."""
    expression = "torch.empty(4, out=torch.zeros(4, dtype=dtype), dtype=dtype)"
    assert is_poisoned(allocate_as("quads_common.anything", expression, torch.uint8))
    assert not allocate_as("vllm.worker", expression, torch.uint8).any()


def test_compiled_code_can_allocate():
    """The look at the caller must not break a graph."""

    @torch.compile(backend="eager", fullgraph=True)
    def ones_like(x):
        return torch.empty_like(x).fill_(1)

    assert ones_like(torch.zeros(3)).tolist() == [1, 1, 1]
