"""Processes of our own: forks from a clean template, and their log."""
