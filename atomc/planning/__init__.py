"""How a model will run, and what fits, before it does: memory and time from its graphs (plan.py), or timed (measure.py)."""
