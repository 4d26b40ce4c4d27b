"""AITER's matrix products, plain, scaled and packed."""
