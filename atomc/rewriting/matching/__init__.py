"""Where in a graph a traced pattern stands (search.py), and why not where it nearly does
(near_miss.py, growth.py).
"""
