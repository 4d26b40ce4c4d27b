"""A second start finds on disk what the first one compiled."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch, atomc
from atomc import ops

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))

    def forward(self, x):
        heads = torch.sin(x * self.weight).view(-1, 2, 8)
        return x + torch.cos(ops.attention(heads, heads, heads, scale=0.3).view(-1, 16))

model = torch.nn.ModuleList(Layer() for _ in range(3))

def forward(x):
    for layer in model:
        x = layer(x)
    return x

with torch.inference_mode():
    x = torch.arange(80.0).view(5, 16)
    out = torch.compile(forward, backend="atom", options={"glue": "inductor"})(x)
    torch.testing.assert_close(out, forward(x))
print(next(note for note in atomc.reports()[-1].notes if "pieces" in note))
"""


def start(cache: Path, seed: str) -> str:
    """The note on pieces from a process of its own."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    assert start(tmp_path, "1") == "glue: 4 pieces, 3 unique, 0 from Inductor's cache"
    assert start(tmp_path, "2") == "glue: 4 pieces, 3 unique, 3 from Inductor's cache"
