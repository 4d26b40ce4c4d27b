"""Renders reports as text and HTML."""
