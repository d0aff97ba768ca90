"""Triton kernels of the general GPU bodies; importing a module of this package needs Triton.

`flint_kernels/backends/gpu_general.py` imports them when an op is first called on a GPU. A kernel
sees contiguous tensors unless its docstring says otherwise, computes offsets in 64 bits, and
takes BF16 or FP32 activations: with FP32 ones it rounds nowhere and multiplies in full FP32.
"""
