"""Native FP4 GEMMs for Blackwell: sm_100, sm_103 and sm_120, backend ``blackwell``.

``capability`` says which GPUs, before anything is compiled: Triton up to 3.6 aborts the process
where it has no instruction for ``tl.dot_scaled``. Compiled for these GPUs and computed in Triton's
interpreter by the tests; never run on one.
"""
