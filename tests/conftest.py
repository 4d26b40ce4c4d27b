"""What every test runs under: strict, one thread a worker, Triton in its interpreter where there is no GPU."""

import os
import sys

# Read when torch, Triton and atomc are imported, so set before any of them is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("ATOMC_STRICT", "1")
os.environ.setdefault("ATOMC_CACHE", "0")  # every test compiles; those of the cache say so

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if HAS_GPU:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA or ROCm device"))


@pytest.fixture(autouse=True)
def forget_what_dynamo_compiled():
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
