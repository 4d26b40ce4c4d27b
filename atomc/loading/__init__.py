"""From a checkpoint to the parameters of a model, with limits on what a file may claim."""
