"""Replace idioms of models, written in plain PyTorch, by ops."""
