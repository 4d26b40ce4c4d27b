"""A runnable file per pass that changed a graph (dump.py), what they run on (replay.py), and how two differ (diff.py)."""
