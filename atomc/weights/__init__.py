"""Where parameters are: packed (merged), prepared (relaid), or passed to a compiled graph."""
