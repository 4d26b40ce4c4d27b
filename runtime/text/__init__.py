"""From the text of a client to token ids, and back."""
