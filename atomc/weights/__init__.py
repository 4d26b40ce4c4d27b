"""TODO atomc.weights."""
