"""Recurrent layers: short convolutions, the delta rule, state space models."""
