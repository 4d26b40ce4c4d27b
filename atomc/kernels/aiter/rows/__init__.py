"""AITER's kernels of single rows: norms, activations, quantization, RoPE and cache writes."""
