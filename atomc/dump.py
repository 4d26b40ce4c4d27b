"""One runnable Python file per changing pass."""

from torch.fx import GraphModule


class Dumper:
    """Writes numbered files into a folder; does nothing without one."""

    def __init__(self, folder: str | None):
        self.folder, self.count = folder, 0

    def __call__(self, gm: GraphModule, name: str) -> None:
        if self.folder is None:
            return
