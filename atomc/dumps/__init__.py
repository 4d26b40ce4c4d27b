"""Dumps: one runnable file per pass (dump.py), their run-time support (replay.py), and their
comparison (diff.py).
"""
