"""`atomc run-batch`: OpenAI's batch files, with the answers of the server."""

import asyncio
import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from atomc.cli import main
from atomc.errors import RunError

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import COMPILED, KEY  # noqa: E402

from atomc.runtime.server.engines.client import EngineDead, EngineLost, RequestRefused  # noqa: E402
from atomc.runtime.server.engines.ipc import Refused  # noqa: E402
from atomc.runtime.server.http.responses import JSONResponse  # noqa: E402
from atomc.runtime.server.openai import run_batch as running  # noqa: E402
from atomc.runtime.server.openai.batch_line import LineError, read_request  # noqa: E402
from atomc.runtime.server.service.image_budget import ImageBudget  # noqa: E402

pytestmark = pytest.mark.xdist_group("server")
CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
GREEDY = {"model": "atomc-demo", "temperature": 0, "max_tokens": 6}
HELLO = {"messages": [{"role": "user", "content": "She looked at him and said"}]}


def line(custom_id, url, **body):
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


LINES = [
    line("chat", CHAT, **HELLO, **GREEDY),
    line("text", TEXT, prompt=["She said", "He said"], **GREEDY, n=2, seed=1),
    line("schema", CHAT, **HELLO, **GREEDY, guided_choice=["yes", "no"]),
    line("embedding", EMBED, input="She said", model="atomc-demo"),
    line("no model", TEXT, prompt="x", max_tokens=1, temperature=0),
    line("field", TEXT, prompt="x", unknown=True, **GREEDY),
    line("value", TEXT, prompt="x", max_tokens=-1, model="atomc-demo"),
    line("type", CHAT, messages="x", model="atomc-demo"),
    line("name", TEXT, prompt="x", model="gpt-4o"),
]


@pytest.mark.rotating
def test_lines_get_the_answers_that_the_server_gives(api_server, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = [
        line("chat", TEXT, prompt="x"),
        line("stream", CHAT, **HELLO, stream=True),
        line("url", "/v1/images/edits"),
    ]
    texts = [*map(json.dumps, [*LINES, *bad]), "", "{"]
    source.write_text("\n".join(texts))
    flags = ["--max-logprobs", 5, "--options", "layout=paged"]
    command = ["-m", "atomc", "run-batch", "-i", source, "-o", target, *flags]
    environment = {"OMP_NUM_THREADS": "1", "ATOMC_CACHE": "1", "ATOMC_CACHE_DIR": COMPILED}
    ran = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == f"6 of 13 requests answered, 7 failed: {target}\n"
    found = [json.loads(each) for each in target.read_text().splitlines()]
    assert all(each.keys() == {"id", "custom_id", "response", "error"} for each in found)
    assert len({each["id"] for each in found}) == 13
    answers = {each["custom_id"]: each["response"] for each in found if each["response"]}
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=api_server.url, headers=headers, timeout=60) as http:
        for request in LINES:
            theirs = http.post(request["url"], json=request["body"])
            ours = answers[request["custom_id"]]
            assert ours["status_code"] == theirs.status_code
            ours, theirs = ours["body"], theirs.json()
            assert comparable(ours) == comparable(theirs), request
            for a, b in zip(ours.get("data", ()), theirs.get("data", ()), strict=True):
                assert a["embedding"] == pytest.approx(b["embedding"], abs=1e-2)
    assert "a batch has no streams" in answers["stream"]["body"]["error"]["message"]
    errors = {each["custom_id"]: each["error"] for each in found if each["error"]}
    assert errors.keys() == {"chat", "url", None}
    assert {each["code"] for each in errors.values()} == {"invalid_line"}
    assert errors["chat"]["message"].startswith("line 10: custom_id is also that of line 1,")
    assert errors["url"]["message"].startswith("line 12: url is '/v1/images/edits', expected /v1/")
    assert errors[None]["message"].startswith("line 14: it is not JSON")


def comparable(body):
    """Without what differs between two runs: name, time, embedding, hits in the prefix cache."""
    usage = {k: v for k, v in body.get("usage", {}).items() if k != "prompt_tokens_details"}
    return {k: v for k, v in body.items() if k not in ("id", "created", "usage", "data")}, usage


@pytest.mark.parametrize(
    "text, message",
    [
        (b"{", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"\xff", "it is not JSON"),
        ("{}".encode("utf-16"), "it is not JSON: it is UTF-16 or UTF-32"),
        (b"[1]", "it is a list, expected an object"),
        (b"{}", "it has no custom_id, expected custom_id, method, url, body"),
        (b'{"custom_id": 3}', "custom_id is 3, expected a string"),
        (b'{"custom_id": "a", "method": "POST"}', "it has no url, expected custom_id, method,"),
        (
            json.dumps(line("a", TEXT) | {"method": "GET"}).encode(),
            "method is 'GET', expected 'POST'",
        ),
        (json.dumps(line("a", 3)).encode(), "url is 3, expected a string"),
        (
            json.dumps(line("a", TEXT) | {"body": [1]}).encode(),
            "body is a list, expected an object",
        ),
    ],
)
def test_a_line_that_is_no_request_says_why(text, message):
    with pytest.raises(LineError, match=message):
        read_request(text)


def batch_of(monkeypatch, errors, num_lines=1, write=None):
    """The batch, and its output, where the endpoint raises these errors before it answers. write:
    in place of that of the output.
    """
    left = list(errors)

    async def endpoint(service, body, request):
        if left:
            raise left.pop(0)
        return JSONResponse({"prompt": body.prompt})

    monkeypatch.setitem(running.ENDPOINTS, TEXT, (running.CompletionRequest, endpoint))
    service = SimpleNamespace(
        image_budget=ImageBudget(1),
        config=SimpleNamespace(strict_requests=False),
        model=SimpleNamespace(max_len=99),
    )
    written = []
    lines = [json.dumps(line(str(i), TEXT, prompt=str(i))).encode() for i in range(num_lines)]
    batch = running.BatchRun(service, write or written.append)
    try:
        asyncio.run(batch.run(lines))
    finally:
        found = [json.loads(each) for each in written]
    return batch, found


def test_a_request_waits_while_the_queue_is_full_and_moves_to_another_engine(monkeypatch):
    full = RequestRefused(Refused("a", "the queue is full", retry_after=0.01))
    batch, found = batch_of(monkeypatch, [full, EngineLost("engine 1 is gone"), full], 700)
    assert sorted(int(each["response"]["body"]["prompt"]) for each in found) == [*range(700)]
    assert (batch.num_done, batch.num_failed) == (700, 0)


def test_an_internal_error_is_that_of_its_line(monkeypatch, caplog):
    batch, found = batch_of(monkeypatch, [KeyError("x")], 2)
    assert sorted(each["response"]["status_code"] for each in found) == [200, 500]
    assert batch.num_failed == 1 and "KeyError" in caplog.text
    assert "KeyError" not in json.dumps(found)


def test_a_dead_engine_ends_the_batch(monkeypatch):
    with pytest.raises(RunError, match=r"^the engine's process was killed$"):
        batch_of(monkeypatch, [EngineDead("the engine's process was killed")], 3)


def test_a_full_disk_ends_the_batch(monkeypatch):
    def write(line):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(RunError, match="No space left on device"):
        batch_of(monkeypatch, [], 3, write)


def test_several_processes_of_torchrun_do_not_write_one_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text("")
    place = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "MASTER_PORT": 1, "MASTER_ADDR": "a"}
    for name, value in {"TORCHELASTIC_RUN_ID": "none", **place}.items():
        monkeypatch.setenv(name, str(value))
    assert main(["run-batch", "-i", str(file), "-o", str(tmp_path / "out")]) == 2
    assert "each would answer all requests" in capsys.readouterr().err


def test_files_are_checked_before_the_start(tmp_path, capsys):
    file = tmp_path / "in.jsonl"

    def wrong(*argv):
        assert main(["run-batch", *map(str, argv)]) == 2
        return capsys.readouterr().err

    assert "No such file" in wrong("-i", file, "-o", tmp_path / "out")
    file.write_text("")
    assert "-i and -o are the same file" in wrong("-i", file, "-o", file)
    os.mkfifo(tmp_path / "pipe")
    assert "is no regular file" in wrong("-i", tmp_path / "pipe", "-o", tmp_path / "out")
    assert "No such file" in wrong("-i", file, "-o", tmp_path / "none" / "out")
