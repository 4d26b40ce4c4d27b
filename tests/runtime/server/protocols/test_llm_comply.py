"""llm-comply against the server: the specifications of three APIs, as another program reads them.

llm-comply is not on PyPI. To run this, with jsonschema installed:

    git clone --branch v0.2.0 https://github.com/Oaklight/llm-comply
    PYTHONPATH=llm-comply/src pytest tests/runtime/server/protocols/test_llm_comply.py
"""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
pytest.importorskip("llguidance")
from serving import KEY, serving

from atomc import demo

pytestmark = [
    pytest.mark.xdist_group("server"),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_comply", "jsonschema")),
        reason="llm-comply and jsonschema are not installed",
    ),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The demo model, which likes to end where it would write a period: by itself it writes to the
    length limit, and llm-comply expects answers that end.
    """
    folder = tmp_path_factory.mktemp("comply") / "brief"
    shutil.copytree(demo.PATH, folder, ignore=shutil.ignore_patterns("__*"))
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    weights = load_file(folder / "model.safetensors")
    rows = weights["model.embed_tokens.weight"]  # of the head, too
    rows[end] = 1.3 * rows[vocab["."]]
    save_file(weights, folder / "model.safetensors")
    flags = ("--tool-call-parser", "hermes", "--options", "layout=paged", "--seed", "1")
    with serving(folder, "--served-model-name", "brief", "--api-key", KEY, *flags) as found:
        yield found


@pytest.mark.parametrize("api", ["openai-chat", "open-responses", "anthropic"])
def test_everything_but_images_complies(server, api):
    """The demo model reads no images."""
    command = [sys.executable, "-m", "llm_comply.cli", "run", "--json", "--format", api]
    command += ["-u", f"{server.url}/v1", "-m", "brief", "-k", KEY]
    command += ["-H", "anthropic-version:2023-06-01"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    assert found["summary"]["total"] >= 8
    failed = {each["name"]: each["errors"] for each in found["results"] if "errors" in each}
    assert failed.keys() == {"Image Input"}, failed
    assert found["summary"]["passed"] == found["summary"]["total"] - 1
