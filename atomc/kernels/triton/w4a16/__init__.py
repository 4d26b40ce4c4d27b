"""Products with weights of four bits."""
