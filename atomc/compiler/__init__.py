"""From a graph to a callable: pipeline, kernel selection, token ranges, partition, CUDA graphs, and
explain.
"""
