"""Anthropic's Messages API, rendered from the deltas of a chat."""
