"""Rewrites and passes over a graph, and the search for the sites of a pattern."""
