"""httpx for tests of the server: a request that needs a model and names none is sent with the name
that the server of tests/serving.py serves.
"""

import json as texts
from contextlib import contextmanager

import httpx
from serving import SERVED

from atomc.runtime.server.messages_api.errors import COUNT_TOKENS, MESSAGES

NEED_MODEL = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    MESSAGES,
    COUNT_TOKENS,
}


def __getattr__(name):
    return getattr(httpx, name)


class _Naming:
    def build_request(self, method, url, *, content=None, json=None, **kwargs):
        whole = self._merge_url(url)
        name = SERVED.get(f"{whole.scheme}://{whole.netloc.decode()}")
        if method == "POST" and name is not None and whole.path in NEED_MODEL:
            if isinstance(json, dict) and "model" not in json:
                json = {"model": name, **json}
            if isinstance(content, str):
                content = content.encode(errors="surrogatepass")
            if isinstance(content, bytes) and content[:2] == b'{"' and b'"model"' not in content:
                content = b'{"model":%s,' % texts.dumps(name).encode() + content[1:]
        return super().build_request(method, url, content=content, json=json, **kwargs)


class Client(_Naming, httpx.Client):
    pass


class AsyncClient(_Naming, httpx.AsyncClient):
    pass


def post(url, *, timeout=5, **kwargs):
    with Client(timeout=timeout) as client:
        return client.post(url, **kwargs)


@contextmanager
def stream(method, url, *, timeout=5, **kwargs):
    with Client(timeout=timeout) as client, client.stream(method, url, **kwargs) as response:
        yield response
