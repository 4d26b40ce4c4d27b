"""Linear attention by flash-linear-attention (fla), on request only: where the option `providers`
names fla.
"""

MODULES = ("delta_rule",)
