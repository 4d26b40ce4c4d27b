"""Bytes, headers, limits and errors of HTTP."""
