"""Engines and their ranks as actors of a Ray cluster that is already running."""
