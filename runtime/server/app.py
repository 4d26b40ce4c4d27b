"""The FastAPI application: routes, middlewares, and exception handlers that return OpenAI's error
format.
"""

from functools import cache
from http import HTTPStatus
from importlib import import_module
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from atomc.runtime.server import operations, status
from atomc.runtime.server.anthropic.endpoints import count_tokens, messages
from atomc.runtime.server.anthropic.errors import COUNT_TOKENS, ERROR_FORMAT, MESSAGES
from atomc.runtime.server.anthropic.errors import ErrorResponse as AnthropicError
from atomc.runtime.server.anthropic.request import MessagesRequest, PromptRequest
from atomc.runtime.server.engines.client import EngineDead, RequestRefused
from atomc.runtime.server.http.api_keys import ApiKeys
from atomc.runtime.server.http.body_budget import BodyBudgetMiddleware
from atomc.runtime.server.http.body_timeout import BodyTimeoutMiddleware
from atomc.runtime.server.http.errors import APIError, invalid_field, to_api_error
from atomc.runtime.server.http.json_body import checked_json_route
from atomc.runtime.server.http.responses import AuthMiddleware, JSONResponse, error_response
from atomc.runtime.server.http.unknown_fields import IGNORED_FIELDS, check_unknown_fields
from atomc.runtime.server.http.unread_body import UnreadBodyMiddleware
from atomc.runtime.server.http.web_pages import WebPages
from atomc.runtime.server.openai import lora
from atomc.runtime.server.openai.chat_completions import chat_completions
from atomc.runtime.server.openai.completions import completions
from atomc.runtime.server.openai.embeddings import embeddings
from atomc.runtime.server.openapi import docs_page
from atomc.runtime.server.openapi.schema import openapi_schema
from atomc.runtime.server.responses import endpoints as responses_api
from atomc.runtime.server.responses.request import ResponsesRequest
from atomc.runtime.server.service import protocol
from atomc.runtime.server.service.image_budget import ImageBudgetMiddleware
from atomc.runtime.server.service.service import Service

# The page at / is static; it loads its data from /status, which needs a key.
# The schema describes every server of this version.
OPEN_PATHS = frozenset(
    {"/", "/health", "/ping", "/ready", "/metrics", "/version", "/openapi.json", *docs_page.PATHS}
)
# What concerns all users of the server, not the model's answer to one.
OPERATION_PATHS = frozenset(
    {
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/reset_prefix_cache",
        "/start_profile",
        "/stop_profile",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/experts",
        "/compiler",
        "/compiler/report",
        "/status",
        "/load",
    }
)


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    error: ErrorBody


def error_responses(model: type[Any]) -> dict[int | str, dict[str, Any]]:
    """The error responses of an endpoint, for the OpenAPI schema."""
    return {
        code: {"model": model, "description": HTTPStatus(code).phrase}
        for code in (400, 401, 403, 404, 413, 429, 500, 503)
    }


def create_app(service: Service) -> Any:
    """The ASGI application."""
    responses = error_responses(ErrorAnswer)
    app = FastAPI(
        title="atomc",
        docs_url=None,
        redoc_url=None,
        responses=responses,
        generate_unique_id_function=lambda route: route.name,
    )
    app.openapi = cache(  # type: ignore[method-assign]
        lambda: openapi_schema(app, import_module("atomc").__version__, OPEN_PATHS)
    )
    app.router.route_class = checked_json_route(lambda: service.model.max_len)
    _add_routes(app, service)
    app.include_router(status.router(service))
    app.include_router(docs_page.router())
    for kind in (APIError, EngineDead, RequestRefused, Exception):
        app.add_exception_handler(kind, _on_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    # Lone surrogates in a text; which code raises the error depends on the field.
    app.add_exception_handler(UnicodeError, _on_unicode_error)
    config = service.config
    authenticated = AuthMiddleware(
        BodyBudgetMiddleware(
            ImageBudgetMiddleware(app, service.image_budget),
            config.max_bodies_bytes,
        ),
        keys=ApiKeys(config.api_key, config.admin_key),
        # A page that was rebound to this server has no key.
        pages=WebPages(config.allow_origin, None if config.api_key else config.allow_host),
        open_paths=OPEN_PATHS,
        operation_paths=OPERATION_PATHS,
        max_body_bytes=config.max_body_bytes,
        error_formats=(ERROR_FORMAT,),
        count_error=lambda code: service.metrics.refused.labels(service.metrics.model, code).inc(),
    )
    timed = BodyTimeoutMiddleware(UnreadBodyMiddleware(authenticated), config.body_timeout)
    if not config.allow_origin:
        return timed
    return CORSMiddleware(
        timed,
        allow_origins=config.allow_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", IGNORED_FIELDS],
    )


def _add_routes(app: FastAPI, service: Service) -> None:
    anthropic_error_responses = error_responses(AnthropicError)
    strict = service.config.strict_requests

    @app.get("/v1/models")
    async def models() -> Response:
        return await operations.models(service)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        return await operations.models(service, name)

    @app.post("/v1/completions")
    async def complete(body: protocol.CompletionRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await completions(service, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: protocol.ChatRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await chat_completions(service, body, request)

    @app.post(MESSAGES, responses=anthropic_error_responses)
    async def create_message(body: MessagesRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await messages(service, body, request)

    @app.post(COUNT_TOKENS, responses=anthropic_error_responses)
    async def count_message_tokens(body: PromptRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await count_tokens(service, body, request)

    @app.post("/v1/responses")
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await responses_api.create_response(service, body, request)

    @app.post("/v1/responses/compact", include_in_schema=False)
    async def compact_responses() -> Response:
        # Its path is also that of a response, which would make it status 405.
        raise APIError(
            404,
            "no endpoint POST /v1/responses/compact: this server does not compact conversations; "
            "ask the model for a summary, and send it instead of the older items",
        )

    @app.get("/v1/responses/{response_id}")
    async def retrieve_response(
        response_id: str, request: Request, stream: bool = False
    ) -> Response:
        return await responses_api.retrieve_response(service, request, response_id, stream)

    @app.delete("/v1/responses/{response_id}")
    async def delete_response(response_id: str, request: Request) -> Response:
        return await responses_api.delete_response(service, request, response_id)

    @app.get("/v1/responses/{response_id}/input_items")
    async def list_input_items(
        response_id: str,
        request: Request,
        order: Literal["asc", "desc"] = "desc",
        limit: int = 20,
        after: str | None = None,
    ) -> Response:
        return await responses_api.list_input_items(
            service, request, response_id, order, limit, after
        )

    @app.post("/v1/embeddings")
    async def embed(body: protocol.EmbeddingRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await embeddings(service, body, request)

    @app.post("/tokenize")
    async def tokenize(body: protocol.TokenizeRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await operations.tokenize(service, body, request)

    @app.post("/detokenize")
    async def detokenize(body: protocol.DetokenizeRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await operations.detokenize(service, body)

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": import_module("atomc").__version__})

    @app.get("/load")
    async def load() -> Response:
        return JSONResponse(
            {"server_load": sum(each.num_unfinished for each in service.engines.clients)}
        )

    @app.post("/ping", include_in_schema=False)  # Amazon SageMaker's name
    @app.get("/ping", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        return await operations.health(service)

    @app.get("/ready")
    async def ready() -> Response:
        return await operations.ready(service)

    @app.get("/metrics")
    async def metrics() -> Response:
        return await operations.metrics(service)

    @app.get("/experts")
    async def experts() -> Response:
        return await operations.experts(service)

    @app.get("/compiler")
    async def compiler() -> Response:
        return await operations.compiler(service)

    @app.get("/compiler/report", include_in_schema=False)
    async def compiler_page() -> Response:
        return await operations.compiler_page(service)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        return await operations.reset_prefix_cache(service)

    @app.post("/v1/load_lora_adapter")
    async def load_adapter(body: protocol.LoadAdapterRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await lora.load_adapter(service, body)

    @app.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: protocol.UnloadAdapterRequest, request: Request) -> Response:
        check_unknown_fields(body, request, strict=strict)
        return await lora.unload_adapter(service, body)

    @app.post("/sleep")
    async def sleep(level: int = 1) -> Response:
        return await operations.sleep(service, level)

    @app.post("/wake_up")
    async def wake_up(tags: Annotated[list[str], Query()] = []) -> Response:  # noqa: B006
        return await operations.wake_up(service, tags)

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return await operations.is_sleeping(service)

    @app.post("/start_profile")
    async def start_profile() -> Response:
        return await operations.profile(service, start=True)

    @app.post("/stop_profile")
    async def stop_profile() -> Response:
        return await operations.profile(service, start=False)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(to_api_error(error))


async def _on_disconnect(request: Request, error: Exception) -> Response:
    """The client has disconnected: the response is discarded and not counted as an error."""
    return Response()


async def _on_validation_error(request: Request, error: Exception) -> Response:
    """The first validation error, with the field."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    location = [str(part) for part in first["loc"][1:]]  # behind "body" or "query"
    content_type = request.headers.get("content-type", "")
    if not location and "json" not in content_type:
        got = (
            f"Content-Type is {content_type!r}"
            if content_type
            else "the request has no Content-Type"
        )
        return error_response(
            APIError(400, f"{got}: send JSON with the header 'Content-Type: application/json'")
        )
    if first["type"] == "json_invalid":
        return error_response(APIError(400, f"the body is not JSON: {first['ctx']['error']}"))
    return error_response(invalid_field(location, first["msg"]))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(
        error.__cause__, APIError
    ):  # raised by the middleware while FastAPI reads the body
        return error_response(error.__cause__)
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    message = (
        f"no endpoint {request.method} {request.url.path}"
        if error.status_code in (404, 405)
        else str(error.detail)
    )
    return error_response(APIError(error.status_code, message, kind, headers=error.headers))


async def _on_unicode_error(request: Request, error: Exception) -> Response:
    return error_response(
        APIError(400, "the body has text that is not valid Unicode, such as a lone surrogate")
    )
