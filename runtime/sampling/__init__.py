"""From the logits of a step to tokens, log-probabilities and pooled states."""
