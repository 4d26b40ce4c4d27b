"""Where parameters live: packed (merged), prepared (relaid for a kernel), and passed to a compiled
graph.
"""
