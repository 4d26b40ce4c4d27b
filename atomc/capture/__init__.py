"""Converts Dynamo's graph to a functional ATen graph (functional.py); repeated layers are traced
once (regions.py).
"""
