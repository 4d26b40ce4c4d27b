"""Attention over AITER's paged and shuffled caches, and the writes into them."""
