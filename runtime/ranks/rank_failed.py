"""The error of a group of ranks that has ended."""

from collections.abc import Callable


class RankFailed(RuntimeError):
    """A rank died, hung or failed alone, and the group was ended. by_user: the message describes an
    error that a user can fix.
    """

    def __init__(self, message: str, *, by_user: bool = False) -> None:
        super().__init__(message)
        self.by_user = by_user


# Called in another thread if a failure is not raised soon.
FailureHandler = Callable[[RankFailed], None]
