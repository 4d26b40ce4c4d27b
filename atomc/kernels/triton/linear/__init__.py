"""Matrix products: plain, scaled, of adapters, and of a batch of heads."""
