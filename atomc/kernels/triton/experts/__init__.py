"""Mixtures of experts: routing, sorting, and products for few and for many tokens."""
