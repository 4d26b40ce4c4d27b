"""Bytes, FLOPs and time of a graph as formulas, and what more fusion and fewer bits would save."""
