"""Sizes of the routed experts of real models: hidden, intermediate, experts, top_k."""

__all__ = ["SHAPES"]

SHAPES = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "qwen3-235b-tp4": (4096, 384, 128, 8),
    "glm-4.5-air": (4096, 1408, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "tiny": (64, 32, 4, 2),
}
