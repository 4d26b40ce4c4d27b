"""Reports for people to read."""
