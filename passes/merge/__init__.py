"""Merge ops that read the same input."""
