"""Reading and writing files: JSON with its types, atomic writes, files that a flag names."""
