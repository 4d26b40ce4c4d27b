"""The serving runtime: from requests to tokens."""
