"""The page /docs: Swagger UI, with the files of the package fastapi-offline."""

import re
from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, HTMLResponse, Response

from atomc.runtime.server.http.responses import APIError
from atomc.runtime.server.status import hash_source

PACKAGE = "fastapi_offline"
FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
PATHS = ("/docs", *(f"/docs/{name}" for name in FILES))


def router() -> APIRouter:
    """The page and its two files; a 404 that names the package if it is not installed."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/docs")
    async def show() -> Response:
        _folder()
        page = get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="atomc",
            swagger_js_url="/docs/swagger-ui-bundle.js",
            swagger_css_url="/docs/swagger-ui.css",
            swagger_favicon_url="data:,",
        )
        return HTMLResponse(page.body, headers=_headers(bytes(page.body).decode()))

    @routes.get("/docs/{name}")
    async def asset(name: str) -> Response:
        if name not in FILES:
            raise APIError(404, f"no file {name!r:.80}, expected {', '.join(FILES)}")
        headers = {"X-Content-Type-Options": "nosniff"}
        return FileResponse(_folder() / name, media_type=FILES[name], headers=headers)

    return routes


def _folder() -> Path:
    """The folder of the package's files. The package itself is not imported."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise APIError(
            404,
            "this page needs the package fastapi-offline: pip install 'atomc[serve]'; the OpenAPI "
            "schema is at /openapi.json",
        )
    return Path(spec.origin).parent / "static"


def _headers(page: str) -> dict[str, str]:
    """A policy that allows this server's files and the page's own script only. Swagger UI sets
    styles of elements.
    """
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script is not None, "FastAPI's page starts Swagger UI in a script"
    policy = (
        f"default-src 'none'; script-src 'self' {hash_source(script[1])}; "
        "style-src 'self' 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
