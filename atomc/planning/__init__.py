"""Predicts memory and time of a model from its graphs (plan.py), or measures its kernels
(measure.py).
"""
