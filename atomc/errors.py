"""The errors a caller may want to catch. Dynamo passes them on as they are, instead of wrapping them."""

from atomc.torch_tracing import ShortenTraceback


class _Shown(ShortenTraceback):
    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)


class OptionsError(_Shown, ValueError):
    """An option that does not exist, has a wrong value, or cannot take effect."""


class ContractError(_Shown, ValueError):
    """The graph does not keep what `expect` promises."""


class RunError(_Shown, RuntimeError):
    """A compiled model was called in a way that it cannot serve."""


class SharingError(RunError):
    """Dynamo took one prepared layer for another."""
