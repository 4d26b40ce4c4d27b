"""How kernels are launched, tiled, and compiled in other processes."""
