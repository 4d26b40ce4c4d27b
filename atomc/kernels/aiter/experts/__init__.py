"""AITER's mixtures of experts and their routing."""
