"""TODO atomc.testing."""
