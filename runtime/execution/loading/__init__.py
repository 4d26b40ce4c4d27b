"""From the name of a model to its module on a device."""
