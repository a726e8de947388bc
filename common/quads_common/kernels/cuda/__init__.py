"""CUDA C++ kernels for sm_90a, compiled at first use; see ``nvrtc``."""
