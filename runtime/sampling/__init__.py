"""Sampling: tokens, log-probabilities and pooled states from the logits of a step."""
