"""Slow, idle and half-open connections, encodings of API keys, and cheap probes."""

import re
import socket
import sys
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("tokenizers")
httpx = pytest.importorskip("httpx")
from serving import serving  # noqa: E402

from atomc.runtime.server.config import ServerConfig  # noqa: E402
from atomc.runtime.server.http.api_keys import ApiKeys, read_keys  # noqa: E402

pytestmark = pytest.mark.xdist_group("server connections")
KEY, IN_FILE = "schl\u00fcssel", "\u9375"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n" % KEY.encode()
STALLED = POST + b'Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"prompt"'
LATE_HEAD, LATE_BODY = b'"code":"header_timeout"', b'"code":"body_timeout"'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"\ufeff{IN_FILE}\n\n")
    with serving(
        "--header-timeout", 2, "--body-timeout", 2, "--api-key", KEY, "--api-key-file", keys
    ) as found:
        yield found


def said(server, first, drip=b""):
    """The bytes that the server sends until it closes the connection; sends `drip` repeatedly."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(first)
        over = threading.Event()

        def feed():
            while drip and not over.wait(0.2):
                try:
                    connection.sendall(drip)
                except OSError:
                    return

        feeder = threading.Thread(target=feed)
        feeder.start()
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:  # closed with unread bytes, after what it sent
            pass
        finally:
            over.set()
            feeder.join()
        return received


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("target", "status"),
    [
        (b"http://host/v1/models", b"200"),
        (b"HTTPS://other:8/v1/models/atomc%2Ddemo?a=http://x/", b"200"),
        (b"http://host/?x", b"200"),  # the page at /
        (b"http://host/nowhere", b"404"),
        (b"/v1/models/http://host/v1/models", b"404"),
    ],
)
def test_a_request_may_name_its_whole_url(server, target, status):
    key = b"Authorization: Bearer %s\r\nConnection: close\r\n" % KEY.encode()
    answer = said(server, b"GET %s HTTP/1.1\r\nHost: host\r\n%s\r\n" % (target, key))
    assert answer.startswith(b"HTTP/1.1 %s " % status), answer
    if target.startswith(b"http") and status == b"200" and b"models" in target:
        without = said(server, b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % target)
        assert without.startswith(b"HTTP/1.1 401 ")


@pytest.mark.rotating
@pytest.mark.parametrize(
    "first, drip, answer",
    [
        (b"", b"", b""),
        (b"GET /health HTTP/1.1\r\nHost", b"", LATE_HEAD),
        (b"GET /health HTTP/1.1\r\nX-Slow: ", b"a", LATE_HEAD),
        (STALLED, b"", LATE_BODY),
        (STALLED, b" ", LATE_BODY),
    ],
    ids=[
        "nothing is sent",
        "half a head",
        "a head byte by byte",
        "half a body",
        "a body byte by byte",
    ],
)
def test_a_connection_that_sends_too_slowly_is_closed(server, first, drip, answer):
    found = said(server, first, drip)
    assert answer in found
    assert found.startswith(b"HTTP/1.1 408 ") == bool(answer)


@pytest.mark.rotating
@pytest.mark.parametrize(
    "first, drip",
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea", b"l"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n", b" "),
    ],
    ids=["a second head", "a body that was answered already"],
)
def test_slow_data_after_a_response_closes_the_connection_without_a_second_response(
    server, first, drip
):
    assert said(server, first, drip).count(b"HTTP/1.1 ") <= 1


@pytest.mark.rotating
def test_a_long_body_is_served_if_it_arrives_fast_enough(server):
    def parts():
        yield (
            b'{"model": "atomc-demo", "prompt": "Once", "max_tokens": 2, "ignore_eos": true'
            + 100_000 * b" "
        )  # 10 seconds more
        time.sleep(3)
        yield b"}"

    headers = {"Authorization": f"Bearer {KEY}".encode(), "Content-Type": "application/json"}
    answer = httpx.post(
        f"{server.url}/v1/completions", content=parts(), headers=headers, timeout=60
    )
    assert answer.json()["usage"]["completion_tokens"] == 2


@pytest.mark.rotating
@pytest.mark.parametrize(
    "header",
    [
        f"Bearer {KEY}".encode(),
        f"Bearer {KEY}".encode("latin-1"),
        f"bearer   {KEY}".encode(),
        f"Bearer {IN_FILE}".encode(),
    ],
)
def test_a_key_that_is_not_ascii_opens(server, header):
    assert (
        httpx.get(
            f"{server.url}/v1/models", headers={"Authorization": header}, timeout=60
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b"Bearer"],
        [b"Bearer "],
        [KEY.encode()],
        [b"Basic " + KEY.encode()],
        [b"Bearer " + KEY.encode()[:-1]],
        [b"Bearer wrong", b"Bearer " + KEY.encode()],
        [b"Bearer " + KEY.encode()] * 2,
    ],
)
def test_anything_but_one_key_does_not(headers):
    assert ApiKeys([KEY]).caller([(b"authorization", header) for header in headers]) is None


@pytest.mark.parametrize(
    "key, part",
    [
        ("", "an api_key is empty"),
        (" a", "begins or ends with white space"),
        ("a\n", "begins or ends"),
        ("a\x00b", "not printable"),
        ("\udcff", "not printable"),
    ],
)
def test_a_key_that_no_client_can_send_is_refused(key, part):
    with pytest.raises(ValueError, match=part):
        ServerConfig(api_key=(key,))


@pytest.mark.parametrize(
    "content, part", [(b"\n \n", "no key"), (b"\xff\xfe", "is not UTF-8"), (b"a\x00", "printable")]
)
def test_a_file_without_good_keys_is_refused(tmp_path, content, part):
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ValueError, match=part):
        read_keys(str(tmp_path / "keys"), "--api-key-file")


@pytest.mark.rotating
def test_any_number_of_probes_costs_at_most_a_token_a_second(server):
    def generated():
        text = httpx.get(f"{server.url}/metrics", timeout=60).text
        return float(re.search(r"atomc:generation_tokens_total\{.*\} (\S+)", text)[1])

    before, began = generated(), time.monotonic()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert {client.get("/ready").status_code for _ in range(50)} == {200}
    seconds = time.monotonic() - began
    assert 1 <= generated() - before <= seconds + 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_connections_are_kept_alive_by_the_system(server):
    port = int(server.url.rpartition(":")[2])
    with httpx.Client(base_url=server.url, timeout=60) as client:
        client.get("/health")
        with open("/proc/net/tcp") as file:
            ours = [
                line.split()
                for line in file
                if f":{port:04X} " in line.split()[1] + " " and line.split()[3] == "01"
            ]
        # Timer kind 2 is keepalive.
        assert {line[5].partition(":")[0] for line in ours} == {"02"}


def test_limits_of_time_are_numbers_above_0():
    for name in ("header_timeout", "body_timeout"):
        for value in (0, -1, float("nan")):
            with pytest.raises(ValueError, match=name):
                ServerConfig(**{name: value})
    with pytest.raises(ValueError, match="restart_engine is -1"):
        ServerConfig(restart_engine=-1)
