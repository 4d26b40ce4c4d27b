"""TODO runtime.sampling."""
