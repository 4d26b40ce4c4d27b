"""Chains of ops become one op."""
