"""Latent attention (MLA) and the indexer of its keys with AITER."""
