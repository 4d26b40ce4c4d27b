"""OpenAI's Responses API, rendered from the deltas of a chat."""
