"""One step on one device."""
