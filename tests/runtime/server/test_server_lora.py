"""LoRA adapters over HTTP: chosen by name, loaded and unloaded while the server generates."""

import json
import os
import signal
import threading

import pytest

pytest.importorskip("fastapi")
transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402
from tiny_lora import merge, shapes_of, write_adapter  # noqa: E402

from atomc import demo  # noqa: E402

pytestmark = pytest.mark.xdist_group("server lora")
PROMPT = "Once upon a time there was"
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODEL = "atomc-demo"


def demo_model():
    model = transformers.AutoModelForCausalLM.from_pretrained(demo.PATH, dtype="float32")
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An allowed folder with the adapters "one", "two" and "wide", and one outside of it."""
    root, model = tmp_path_factory.mktemp("adapters"), demo_model()
    for seed, name in enumerate(("one", "two"), 1):
        write_adapter(root / "allowed" / name, shapes_of(model, *ALL), seed=seed, size=0.1)
    write_adapter(root / "allowed" / "wide", shapes_of(model, "q_proj"), rank=32)
    write_adapter(root / "outside", shapes_of(model, "q_proj"))
    (root / "allowed" / "link").symlink_to(root / "outside")
    return root


@pytest.fixture(scope="module")
def http(folders):
    allowed = folders / "allowed"
    flags = ["--lora", f"one={allowed / 'one'}", "--allowed-lora-path", allowed, "--max-loras", 2]
    with (
        serving(*flags, "--dtype", "float32") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def generated(http, model, **fields):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    assert answer.get("model") == model, answer
    return answer["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def expected(folders):
    """name -> the tokens that transformers generates with the merged weights."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo.PATH)
    found = {}
    for name in ("one", "two", MODEL):
        model = demo_model()
        model = model if name == MODEL else merge(model, folders / "allowed" / name)
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        tokens = model.generate(ids, do_sample=False, max_new_tokens=8)
        found[name] = tokens[0, ids.shape[1] :].tolist()
    assert len(set(map(tuple, found.values()))) == 3, found
    return found


def change(http, what, **body):
    answer = http.post(f"/v1/{what}_lora_adapter", json=body)
    return answer.status_code, answer.json()


def names(http):
    return {each["id"]: each["parent"] for each in http.get("/v1/models").json()["data"]}


@pytest.mark.rotating
def test_an_adapter_is_a_model_with_a_parent_and_its_own_tokens(http, expected):
    assert names(http) == {MODEL: None, "one": MODEL}
    assert http.get("/v1/models/one").json()["parent"] == MODEL
    assert generated(http, "one") == expected["one"]
    assert generated(http, MODEL) == expected[MODEL]
    assert http.post("/v1/embeddings", json={"model": "one", "input": "a"}).status_code == 400


@pytest.mark.rotating
def test_every_endpoint_of_text_takes_the_name_of_an_adapter(http):
    message = [{"role": "user", "content": "Hi"}]
    chat = {"messages": message, "max_tokens": 4}
    for path, body in {
        "/v1/chat/completions": chat,
        "/v1/messages": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 16},
    }.items():
        answer = http.post(path, json={"model": "one", "temperature": 0, **body})
        assert answer.json().get("model") == "one", answer.text


def test_an_adapter_is_loaded_and_unloaded_while_requests_run(http, expected, folders):
    assert generated(http, "one") == expected["one"]  # in the prefix cache, under this adapter
    running, stop = [], threading.Event()

    def run():
        while not stop.is_set():
            running.append(generated(http, "one"))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            two = {"lora_name": "two", "lora_path": str(folders / "allowed" / "two")}
            assert change(http, "load", **two) == (200, {"status": "ok"})
            assert names(http)["two"] == MODEL
            assert generated(http, "two") == expected["two"]
            status, answer = change(http, "load", **two)
            assert status == 400 and "loaded already" in answer["error"]["message"]
            assert change(http, "unload", lora_name="two") == (200, {"status": "ok"})
            assert "two" not in names(http)
            gone = http.post("/v1/completions", json={"model": "two", "prompt": "a"})
            assert gone.status_code == 404
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert running and all(tokens == expected["one"] for tokens in running)


def test_a_request_finishes_with_the_adapter_that_is_unloaded_meanwhile(http, expected, folders):
    two = {"lora_name": "two", "lora_path": str(folders / "allowed" / "two")}
    body = {"model": "two", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "stream": True}
    body |= {"return_token_ids": True, "ignore_eos": True}
    change(http, "load", **two)
    tokens = []
    with http.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if not tokens and line:  # it runs: its place must not be given away
                assert change(http, "unload", lora_name="two")[0] == 200
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                tokens += choices[0]["token_ids"] if choices else []
    assert len(tokens) == 60 and tokens[:8] == expected["two"]


@pytest.mark.rotating
def test_an_adapter_that_cannot_be_used_is_one_error_and_harms_no_one(http, expected, folders):
    allowed = folders / "allowed"
    for path, part in {
        folders / "outside": "no folder below an allowed one",
        allowed / ".." / "outside": "no folder below an allowed one",
        allowed / "link": "no folder below an allowed one",
        allowed / "missing": "no folder below an allowed one",
        allowed: "adapter_config.json",
        allowed / "wide": "raise max_lora_rank",
    }.items():
        status, answer = change(http, "load", lora_name="bad", lora_path=str(path))
        assert status == 400 and part in answer["error"]["message"], answer
        assert str(folders) not in answer["error"]["message"]
    one = str(allowed / "one")
    assert change(http, "load", lora_name=MODEL, lora_path=one)[0] == 400
    assert change(http, "unload", lora_name="bad")[0] == 404
    assert "bad" not in names(http)
    assert generated(http, "one") == expected["one"]


@pytest.mark.slow
def test_a_restarted_engine_has_the_adapters_that_were_loaded(folders, expected):
    allowed = folders / "allowed"
    flags = ["--allowed-lora-path", allowed, "--restart-engine", 1, "--dtype", "float32"]
    with (
        serving("--lora", f"one={allowed / 'one'}", *flags) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        assert change(client, "load", lora_name="two", lora_path=str(allowed / "two"))[0] == 200
        assert change(client, "unload", lora_name="one")[0] == 200
        os.kill(server.engine_pid, signal.SIGKILL)
        server.wait_for("serves again")
        assert generated(client, "two") == expected["two"]
        assert set(names(client)) == {MODEL, "two"}
