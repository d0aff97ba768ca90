"""Plain PyTorch bodies of every op: the CPU implementation, the reference, and the oracle.

With BF16 activations they round at every rounding point of the model; with FP32 ones they round
nowhere. `flint_kernels/backends/cpu.py` registers them.
"""
