"""Graph changes: what each pass does, and the order they run in."""
