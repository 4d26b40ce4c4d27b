"""Benchmarks: load on a server, offline runs of an engine, and startup time."""
