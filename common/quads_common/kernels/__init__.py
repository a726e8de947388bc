"""Triton kernels of the layers: equal to the torch code of ``quads_common`` in what they compute.

Public modules (``quantize``, ``rows``, ``units``, ``gemm``, ``moe``) check arguments and launch;
modules with an underscore hold device code only. Nothing here is imported by ``import
quads_common``, so Triton is loaded by those who run a kernel.

Every kernel is launched with ``enable_fp_fusion=False``: the compiler would otherwise contract
multiply-adds, which the contract in ``format`` forbids.
"""
