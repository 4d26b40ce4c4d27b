"""The classes of transformers, run through the ops of atomc."""
