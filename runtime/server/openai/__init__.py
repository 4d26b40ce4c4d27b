"""OpenAI's chat completions, completions, embeddings and batches."""
