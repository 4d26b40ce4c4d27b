"""Images of chat messages: read safely, decoded, and prepared for a model's vision encoder."""
