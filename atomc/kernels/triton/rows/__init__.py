"""Kernels of single rows: norms, activations, quantization, RoPE and cache writes."""
