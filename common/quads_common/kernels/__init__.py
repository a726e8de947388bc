"""Kernels of the layers: equal to the torch code of ``quads_common`` in what they compute.

Public modules check arguments and launch; modules with an underscore hold Triton's device code
only. Nothing here is imported by ``import quads_common``, so Triton is loaded by those who run a
kernel.

- ``quantize``, ``rows``, ``compensated_rows``: quantizers of weights and of activations; ``units``
  of weights that arrive in parts.
- ``gemm``, ``compensated_gemm``, and ``route``, the tables that they read.
- ``moe``, ``compensated``: layers. ``blackwell``: layers on FP4 tensor cores.
- ``hopper``, with ``hopper_arguments``, ``hopper_columns`` and ``hopper_memory``: the CUDA C++
  kernels in ``cuda``.
- ``statistics``: of rows that wait to be counted.

The compiler contracts no multiply-add, which the contract in ``format`` forbids: Triton's kernels
are launched with ``enable_fp_fusion=False``, and CUDA C++ is compiled with ``-fmad=false``.
"""
