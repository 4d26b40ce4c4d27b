"""Compares the kernels of a compiled graph with the original nodes on real inputs: see
docs/audit.md.
"""
