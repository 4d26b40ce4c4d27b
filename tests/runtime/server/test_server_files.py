"""Servers configured by files: TOML flags, API keys, a certificate, and a model with a config
only.
"""

import json
import shutil
import signal
import socket
import ssl
import subprocess

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
from serving import serving  # noqa: E402

pytestmark = pytest.mark.xdist_group("server files")
# transformers has this architecture, atomc has no file for it.
MODEL = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "dtype": "float32",
}
FLAGS = """
model = "{folder}/model"
load-format = "dummy"
served-model-name = ["one", "two"]
api-key-file = "{folder}/keys"
ssl-certfile = "{folder}/certificate.pem"
ssl-keyfile = "{folder}/key.pem"
max-num-seqs = 4
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    folder = tmp_path_factory.mktemp("server")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            "key.pem",
            "-out",
            "certificate.pem",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "keys").write_text("a-key\nanother-key\n")
    (folder / "server.toml").write_text(FLAGS.format(folder=folder))
    with serving("--config", folder / "server.toml") as found:
        found.certificate = folder / "certificate.pem"
        yield found


@pytest.fixture(scope="module")
def client(server):
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=server.certificate))
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="another-key", http_client=trusted, max_retries=0
    )


@pytest.mark.rotating
def test_it_serves_over_https_under_the_names_and_with_the_keys_of_the_files(server, client):
    assert server.url.startswith("https://")
    assert [model.id for model in client.models.list().data] == ["one", "two"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="no-key").models.list()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(server.url.replace("https", "http"))


@pytest.mark.rotating
def test_a_stock_class_with_random_weights_generates_and_a_line_says_so(server, client):
    def tokens():
        found = client.completions.create(
            model="two",
            prompt=[5, 6, 7],
            max_tokens=6,
            temperature=0,
            logprobs=0,
            extra_body={"ignore_eos": True},
        )
        assert found.usage.completion_tokens == 6 and found.model == "one"
        return found.choices[0].logprobs.tokens

    assert tokens() == tokens()
    assert (
        len(
            [line for line in server.lines if "Olmo2ForCausalLM has no model file in atomc" in line]
        )
        == 1
    )


@pytest.mark.rotating
def test_without_a_tokenizer_text_is_refused_with_what_to_send(client):
    with pytest.raises(openai.BadRequestError, match="no tokenizer: send token ids"):
        client.completions.create(model="one", prompt="text")
    with pytest.raises(
        openai.BadRequestError, match="stop strings cannot be found: use stop_token_ids"
    ):
        client.completions.create(model="one", prompt=[5], stop=".")
    with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
        client.chat.completions.create(model="one", messages=[{"role": "user", "content": "x"}])


@pytest.mark.rotating
def test_a_client_that_stays_connected_does_not_hold_up_the_end(server, client):
    client.models.list()
    with socket.create_connection(
        ("127.0.0.1", int(server.url.rpartition(":")[2]))
    ):  # it never starts the TLS handshake
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
