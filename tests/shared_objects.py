"""What all tests share, more than a million objects, is nothing that gc looks at: each full
collection took a second, and there are some in every compilation.
"""

import gc

_hidden = False


def hide() -> None:
    """Hide from gc what is alive, unless it is hidden. (gc.get_freeze_count would tell, which walks
    over all of it: 0.07 seconds after every test.)
    """
    global _hidden
    if not _hidden:
        gc.collect()
        gc.freeze()
        _hidden = True


def show() -> None:
    """For a test that looks at all objects; they are hidden again behind it."""
    global _hidden
    gc.unfreeze()
    _hidden = False
