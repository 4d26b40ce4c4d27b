"""Every rewritten place of a graph run both ways, on what really flows through it: see docs/audit.md."""
