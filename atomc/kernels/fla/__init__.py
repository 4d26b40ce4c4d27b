"""Linear attention by flash-linear-attention (fla), on request only: where the option `providers`
names fla.
"""

from atomc.kernels.fla import delta_rule

__all__ = ["delta_rule"]
