"""Finds patterns in a graph (search.py) and explains near misses (near_miss.py, growth.py)."""
