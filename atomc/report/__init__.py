"""TODO atomc.report."""
