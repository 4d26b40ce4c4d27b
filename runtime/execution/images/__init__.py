"""The vision encoder of a model, its graphs and its cache."""
