"""What was compiled before, found again: what it depends on (fingerprint.py), its data (artifact.py), files (store.py)."""
