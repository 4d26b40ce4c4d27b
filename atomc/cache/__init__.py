"""The compile cache: keys (fingerprint.py), serialized programs (artifact.py), files (store.py)."""
