"""Idioms become ops: the graph is raised to what it means."""
