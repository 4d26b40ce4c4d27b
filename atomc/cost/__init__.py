"""TODO atomc.cost."""
