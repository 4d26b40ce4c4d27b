"""The errors a caller may want to catch."""


class OptionsError(ValueError):
    """An option that does not exist, has a wrong value, or cannot take effect."""


class ContractError(ValueError):
    """The graph does not keep what `expect` promises."""


class RunError(RuntimeError):
    """A compiled model was called in a way that it cannot serve."""


class SharingError(RunError):
    """Dynamo took one prepared layer for another."""


OURS = (OptionsError, ContractError, RunError)
