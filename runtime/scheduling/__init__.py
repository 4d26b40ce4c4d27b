"""Who runs next: numbers only, no torch."""
