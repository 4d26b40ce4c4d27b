"""Dynamo's graph as a functional ATen graph (functional.py); repeated layers are traced once and stamped (regions.py)."""
