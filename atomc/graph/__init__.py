"""Reading and writing FX graphs: sizes without guards, a spelling for each op, where nodes come
from, memory, strides.
"""
