"""Models on several devices: which parameters are cut, and what their processes exchange."""
