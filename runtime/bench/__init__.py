"""Measuring: load for a server, runs of an engine, and the time to start."""
