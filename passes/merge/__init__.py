"""What computes on the same input, at once."""
