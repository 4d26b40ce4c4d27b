"""A model on several processes, its ranks: rank 0 is the engine's process, the others follow it."""
