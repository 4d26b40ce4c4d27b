"""What URLs of images may be read: data: URLs, files in allowed folders, and public web addresses."""

import base64
import http.server
import ipaddress
import os
import socket
import threading
import time

import pytest

from atomc.runtime.images.image_error import ImageError
from atomc.runtime.images.media_access import MediaAccess, real_folders
from atomc.runtime.images.web_fetch import WebFetch, is_public

DATA = b"\x89PNG some bytes"


# data: URLs


@pytest.mark.parametrize(
    "header", ["image/png;base64", "IMAGE/PNG;BASE64", ";base64", "image/png;charset=x;base64"]
)
def test_a_data_url_is_its_bytes(header):
    url = f"data:{header},{base64.b64encode(DATA).decode()}"
    assert MediaAccess().read(url) == DATA
    assert MediaAccess().read("DATA" + url[4:]) == DATA


@pytest.mark.parametrize(
    "url, message",
    [
        ("data:", "is not data:image/png;base64"),
        ("data:image/png;base64", "is not data:image/png;base64"),
        ("data:image/png,abcd", "is not data:image/png;base64"),
        ("data:text/plain;base64,YWJj", "the type 'text/plain', expected image/"),
        ("data:image/png;base64,a-_b", "not valid base64"),
        ("data:image/png;base64,YWJ", "not valid base64"),
        ("data:image/png;base64,YW\u00fc=", "not valid base64"),
        ("data:image/png;base64,YWJj YWJj", "not valid base64"),
        ("", "begins with '', expected data:image"),
        ("cat.png", "begins with 'cat.png', expected data:image"),
        ("/etc/passwd", "begins with '/etc/passwd', expected"),
        ("ftp://host/cat.png", "begins with 'ftp://host/cat.p', expected"),
        ("gopher://127.0.0.1/", "expected data:image"),
        ("file:///etc/passwd", "start the server with --allowed-local-media-path"),
        ("http://example.com/cat.png", "send the image as data:image/png;base64"),
        ("HTTPS://example.com/cat.png", "send the image as data:image/png;base64"),
    ],
)
def test_by_default_only_data_urls_are_read(url, message):
    with pytest.raises(ImageError, match=message):
        MediaAccess().read(url)


def test_a_data_url_above_the_limit_is_refused():
    url = "data:;base64," + base64.b64encode(bytes(11)).decode()
    with pytest.raises(ImageError, match="more than 10 bytes"):
        MediaAccess(max_bytes=10).read(url)
    assert MediaAccess(max_bytes=11).read(url) == bytes(11)


# file: URLs


@pytest.fixture
def folder(tmp_path):
    """An allowed folder, reached by a link, with files, links and a pipe; secrets are outside."""
    (tmp_path / "real" / "sub dir").mkdir(parents=True)
    (tmp_path / "real" / "a.png").write_bytes(DATA)
    (tmp_path / "real" / "sub dir" / "b\u00fc.png").write_bytes(b"b")
    (tmp_path / "real-secret").mkdir()
    (tmp_path / "real-secret" / "c.png").write_bytes(b"secret")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "real" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "real" / "out").symlink_to(tmp_path)
    (tmp_path / "real" / "in.png").symlink_to("a.png")
    (tmp_path / "real" / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "real" / "pipe")
    (tmp_path / "allowed").symlink_to(tmp_path / "real")
    return tmp_path / "allowed"


def test_files_of_an_allowed_folder_are_read(folder):
    access = MediaAccess(real_folders([str(folder)]))
    assert access.read(f"file://{folder}/a.png") == DATA
    assert access.read(f"file://localhost{folder}/a.png") == DATA
    assert access.read(f"file://{folder}/sub%20dir/b%C3%BC.png") == b"b"
    assert access.read(f"file://{folder}/in.png") == DATA
    assert access.read(f"file://{folder.parent}/real/a.png") == DATA


@pytest.mark.parametrize(
    "path",
    [
        "missing.png",
        "",
        "sub%20dir",
        "../secret.png",
        "sub%20dir/../a.png",
        "%2e%2e/secret.png",
        "..%2fsecret.png",
        "../real-secret/c.png",
        "out.png",
        "out/secret.png",
        "out/real-secret/c.png",
        "loop",
        "pipe",
        "a.png/x",
        "x" * 5000,
    ],
)
def test_nothing_outside_of_the_allowed_folder_is_read(folder, path):
    access = MediaAccess(real_folders([str(folder)]))
    with pytest.raises(ImageError, match="no image in an allowed folder has this path") as caught:
        access.read(f"file://{folder}/{path}")
    assert str(folder.parent) not in str(caught.value)


@pytest.mark.parametrize("url", ["file:a.png", "file://host/a.png", "file:///a%00b", "file://"])
def test_a_file_url_needs_an_absolute_path_of_this_machine(folder, url):
    with pytest.raises(ImageError, match="expected file:///path"):
        MediaAccess(real_folders([str(folder)])).read(url)


def test_a_file_above_the_limit_is_refused(folder):
    access = MediaAccess(real_folders([str(folder)]), max_bytes=5)
    with pytest.raises(ImageError, match="more than 5 bytes"):
        access.read(f"file://{folder}/a.png")


def test_a_path_that_becomes_a_link_after_the_check_is_not_followed(folder):
    from atomc.runtime.images.media_access import _read_below

    real = folder.resolve()
    for names in (("out.png",), ("out", "secret.png"), ("..", "secret.png")[1:]):
        with pytest.raises(OSError):
            _read_below(real, names, 100)
    assert _read_below(real, ("sub dir", "b\u00fc.png"), 100) == b"b"


def test_an_allowed_folder_must_exist(tmp_path):
    with pytest.raises(ValueError, match="expected a directory"):
        real_folders([str(tmp_path / "gone")])


def test_offline_any_path_is_read(folder):
    access = MediaAccess(any_file=True)
    assert access.read(str(folder / "a.png")) == DATA
    assert access.read(f"file://{folder}/../secret.png") == b"secret"
    with pytest.raises(ImageError, match=r"gone\.png: No such file"):
        access.read(str(folder / "gone.png"))


# Web addresses


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.3.4", "192.168.1.1", "169.254.169.254",
        "100.64.0.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "fe80::1", "fc00::1", "fd12::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.1.1.1",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::", "2001:db8::1", "2001::1",
        "64:ff9b:1::7f00:1", "64:ff9b:1::808:808", "::7f00:1", "::808:808", "fec0::1",
    ],
)  # fmt: skip
def test_addresses_that_are_not_public(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]
)
def test_public_addresses(address):
    assert is_public(ipaddress.ip_address(address))


class Pages(http.server.BaseHTTPRequestHandler):
    """/ok, redirects, and answers that must end with an error."""

    def do_GET(self):
        self.server.asked.append(self.path)
        name, _, rest = self.path[1:].partition("/")
        if name == "redirect":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
        elif name == "slow":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            try:
                for _ in range(1000):
                    self.wfile.write(b"x")
                    time.sleep(0.05)
            except OSError:
                pass
        elif name == "endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(bytes(1000))
            except OSError:
                pass
        else:
            self.send_response({"gone": 404, "error": 500}.get(name, 200))
            length = {"long": 10**9, "short": len(DATA) + 5}.get(name, len(DATA))
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(DATA)

    def log_message(self, *parts):
        pass


@pytest.fixture(scope="module")
def pages():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.asked = []
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    yield server
    server.shutdown()
    server.server_close()


def here(*more, seconds=5.0):
    """Fetching that may connect to 127.0.0.1, for the pages of this test."""
    hosts = frozenset({"127.0.0.1", *more})
    return WebFetch(hosts, seconds, lambda address: str(address) == "127.0.0.1")


def test_an_image_is_fetched_also_over_redirects(pages):
    assert here().get(f"{pages.url}/ok", 100) == DATA
    assert here().get(f"{pages.url}/redirect//ok?size=5", 100) == DATA
    assert here().get(f"{pages.url}/redirect/{pages.url}/redirect//ok", 100) == DATA
    assert pages.asked[-1] == "/ok" and "/ok?size=5" in pages.asked


@pytest.mark.parametrize(
    "path, message",
    [
        ("gone", "answered with status 404"),
        ("error", "answered with status 500"),
        ("long", "more than 100 bytes"),
        ("endless", "more than 100 bytes"),
        ("short", "ended early"),
        ("redirect/" + "/redirect/" * 4 + "/ok", "more than 3 redirects"),
        ("redirect/file:///etc/passwd", "not a valid http or https URL"),
        ("redirect/ftp://127.0.0.1/", "not a valid http or https URL"),
        ("redirect/http://other.example/", "images of host 'other.example' are not allowed"),
    ],
)
def test_an_answer_that_is_no_image_file_is_an_error(pages, path, message):
    with pytest.raises(ImageError, match=message):
        here().get(f"{pages.url}/{path}", 100)


def test_an_answer_that_trickles_in_ends_at_the_limit(pages):
    start = time.monotonic()
    with pytest.raises(ImageError, match=r"exceeded the limit of 0\.5 s"):
        here(seconds=0.5).get(f"{pages.url}/slow", 10**6)
    assert time.monotonic() - start < 3


def test_a_host_that_does_not_answer_ends_at_the_limit():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ImageError, match=r"exceeded the limit of 0\.3 s"):
            here(seconds=0.3).get(url, 100)
        with pytest.raises(ImageError, match=r"exceeded the limit of 0\.3 s"):
            here(seconds=0.3).get(url.replace("http", "https"), 100)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "[::1]"])
def test_private_addresses_are_never_asked(pages, host):
    asked = len(pages.asked)
    with pytest.raises(ImageError, match="has an address that is not public"):
        WebFetch(frozenset("*")).get(f"http://{host}:{pages.server_port}/ok", 100)
    assert len(pages.asked) == asked


def test_a_name_with_one_private_address_is_refused(pages, monkeypatch):
    resolved = [
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, pages.server_port))
        for each in ("127.0.0.1", "10.0.0.1")
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *given, **more: resolved)
    asked = len(pages.asked)
    with pytest.raises(ImageError, match="has an address that is not public"):
        here("two.example").get("http://two.example/ok", 100)
    assert len(pages.asked) == asked


def test_a_redirect_to_a_private_address_is_not_followed(pages):
    """Only ::1 counts as private here."""
    fetch = WebFetch(frozenset("*"), 5.0, lambda address: address.version == 4)
    with pytest.raises(ImageError, match="has an address that is not public"):
        fetch.get(f"{pages.url}/redirect/http://[::1]:{pages.server_port}/ok", 100)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://user:password@127.0.0.1/",
        "http://127.0.0.1:0/",
        "http://127.0.0.1:99999/",
        "http://[::1/",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/a\r\nHost: x",
        "http://127.0.0.1/\u00fc",
    ],
)
def test_an_invalid_web_url_is_refused(url):
    with pytest.raises(ImageError, match="not a valid http or https URL"):
        here().get(url, 100)


def test_only_hosts_that_were_named_are_asked(pages):
    with pytest.raises(ImageError, match=r"images of host '127\.0\.0\.1' are not allowed"):
        WebFetch(frozenset({"example.com"}), 5.0, lambda address: True).get(f"{pages.url}/ok", 100)


def test_a_host_that_refuses_connections_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ImageError, match="fetching the image failed: ConnectionRefusedError"):
        here().get(f"http://127.0.0.1:{port}/", 100)
