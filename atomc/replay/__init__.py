"""Calls of a compiled graph again without their Python: as CUDA graphs, or launch by launch."""
