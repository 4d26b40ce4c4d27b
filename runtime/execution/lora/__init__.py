"""LoRA adapters: their files, their programs and the rows of a batch."""
