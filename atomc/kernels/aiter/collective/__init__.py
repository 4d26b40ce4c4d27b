"""AITER's collectives of several GPUs, fused with norm and quantization."""
