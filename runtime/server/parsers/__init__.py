"""What a model writes, as reasoning, text and calls of tools."""
