"""TODO atomc.compiler."""
