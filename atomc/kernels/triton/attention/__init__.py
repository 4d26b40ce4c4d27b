"""Attention over a paged cache and over packed sequences."""
