"""Mixtures of experts in PyTorch, and their routing."""
