"""A model seen as the runtime needs it: without its head, with its hidden states, of a user."""
