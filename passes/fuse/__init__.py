"""Fuse chains of ops into one op."""
