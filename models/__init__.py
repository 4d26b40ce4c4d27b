"""Models: one plain file per model_type."""
