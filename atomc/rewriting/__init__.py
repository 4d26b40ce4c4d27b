"""TODO atomc.rewriting."""
