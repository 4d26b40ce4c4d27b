"""Predicts memory and time of a model from its graphs, or measures its kernels."""
