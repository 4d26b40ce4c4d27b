"""Latent attention (MLA) and the indexer of its keys."""
