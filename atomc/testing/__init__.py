"""Arguments for every op, and the self-test of the kernels of a machine."""
