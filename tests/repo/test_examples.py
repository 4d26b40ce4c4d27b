"""The programs of examples/ run as their README says, and print what they show."""

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import COMPILED, KEY, Server

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What a program prints, run in this process with what other tests compiled."""
    monkeypatch.setenv("ATOMC_CACHE", "1")
    monkeypatch.setenv("ATOMC_CACHE_DIR", COMPILED)

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(FOLDER / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_list_of_examples_is_complete() -> None:
    rows = re.findall(r"^\| \[(.*?)\]\(\1\) \|", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in FOLDER.glob("*.py"))
    assert len(rows) == 5


@pytest.mark.rotating
def test_a_module_is_equal_to_eager_and_timed(output: Callable[..., str]) -> None:
    text = output("backend.py", "--width", "32", "--layers", "1", "--rounds", "1")
    assert text.startswith("equal to eager\nsilu_and_mul: fired at 1 site")
    assert re.findall(r"^(\w+) +\d+\.\d{3} ms$", text, re.MULTILINE) == [
        "eager",
        "inductor",
        "atom",
    ]


def test_a_near_miss_is_named_repaired_and_required(output: Callable[..., str]) -> None:
    text = output("why_not_fused.py")
    assert re.search(r"^before: silu_and_mul: near miss .*mul\(other=0\.5\)", text, re.MULTILINE)
    assert re.search(r"^after: silu_and_mul: fired at 2 sites", text, re.MULTILINE)
    assert re.search(r"^refused: .*silu_and_mul fired 0 times in 2 layers", text, re.MULTILINE)


def test_text_is_generated_offline_in_a_batch_as_samples_and_as_a_stream(
    output: Callable[..., str],
) -> None:
    lines = output("offline.py").splitlines()
    first = re.fullmatch(r"In the beginning \|['\"](.+)['\"] \(length\)", lines[0])
    assert first is not None
    assert len({line.partition("'")[2] for line in lines[3:6]}) > 1
    assert lines[6] == f"stream {first[1]}"


@pytest.mark.xdist_group("server")
@pytest.mark.parametrize("flags", [[], ["--chat"]], ids=["completion", "chat"])
def test_a_client_streams_from_a_server(
    api_server: Server, output: Callable[..., str], flags: list[str]
) -> None:
    text = output(
        "stream_client.py",
        "Once",
        "--url",
        api_server.url,
        "--key",
        KEY,
        "--max-tokens",
        "5",
        *flags,
    )
    answer, count = text.rstrip().rsplit("\n", 1)
    assert answer and re.fullmatch(r"[1-5] tokens after \d+ of the prompt", count)


@pytest.mark.rotating
def test_an_op_of_the_user_runs_its_kernel_in_a_model() -> None:
    # In a process of its own: an op cannot be taken back.
    done = subprocess.run(
        [sys.executable, FOLDER / "custom_op.py"], capture_output=True, text=True, check=False
    )
    assert done.stdout == "relu_squared: fired at 1 site; runs as mine x1\n", done.stderr
