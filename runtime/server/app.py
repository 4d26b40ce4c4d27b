"""The FastAPI application: endpoints, middlewares, and handlers of exceptions."""

from functools import cache, partial
from http import HTTPStatus
from importlib import import_module
from inspect import signature
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from atomc.runtime.server import operations, status
from atomc.runtime.server.anthropic.endpoints import count_message_tokens, create_message
from atomc.runtime.server.anthropic.errors import COUNT_TOKENS, ERROR_FORMAT, MESSAGES
from atomc.runtime.server.anthropic.errors import ErrorResponse as AnthropicError
from atomc.runtime.server.anthropic.response import AnthropicMessage
from atomc.runtime.server.engines.client import EngineDead, RequestRefused
from atomc.runtime.server.http.api_keys import ApiKeys
from atomc.runtime.server.http.auth_middleware import AuthMiddleware
from atomc.runtime.server.http.json_body import checked_json_route
from atomc.runtime.server.http.request_body import (
    BodyBudgetMiddleware,
    BodyTimeoutMiddleware,
    UnreadBodyMiddleware,
)
from atomc.runtime.server.http.responses import (
    APIError,
    APIErrorResponse,
    ErrorAnswer,
    JSONResponse,
    client_error,
    invalid_field,
)
from atomc.runtime.server.http.turns import TurnsMiddleware
from atomc.runtime.server.http.unknown_fields import IGNORED_FIELDS, check_unknown_fields
from atomc.runtime.server.http.web_pages import WebPages
from atomc.runtime.server.openai import lora
from atomc.runtime.server.openai.chat_completions import chat
from atomc.runtime.server.openai.completions import complete
from atomc.runtime.server.openai.embeddings import embed
from atomc.runtime.server.openapi import docs_page
from atomc.runtime.server.openapi.schema import Endpoint, openapi_schema
from atomc.runtime.server.responses import endpoints as responses_api
from atomc.runtime.server.responses.response import ModelResponse
from atomc.runtime.server.service import response_types as types
from atomc.runtime.server.service.image_budget import ImageBudgetMiddleware
from atomc.runtime.server.service.service import Service

RESPONSES, RESPONSE = "/v1/responses", "/v1/responses/{response_id}"
ENDPOINTS = (
    Endpoint("GET", "/v1/models", operations.models),
    Endpoint("GET", "/v1/models/{name:path}", operations.one_model),
    Endpoint("POST", "/v1/completions", complete, answer=types.Completion, streams=True),
    Endpoint("POST", "/v1/chat/completions", chat, answer=types.ChatCompletion, streams=True),
    Endpoint("POST", MESSAGES, create_message, answer=AnthropicMessage, streams=True),
    Endpoint("POST", COUNT_TOKENS, count_message_tokens),
    Endpoint("POST", RESPONSES, responses_api.create_response, answer=ModelResponse, streams=True),
    # Its path is also that of a response, which would make it status 405.
    Endpoint("POST", f"{RESPONSES}/compact", responses_api.refuse_compact, hidden=True),
    Endpoint("GET", RESPONSE, responses_api.retrieve_response, answer=ModelResponse),
    Endpoint("DELETE", RESPONSE, responses_api.delete_response),
    Endpoint("GET", f"{RESPONSE}/input_items", responses_api.list_input_items),
    Endpoint("POST", "/v1/embeddings", embed, answer=types.Embeddings),
    Endpoint("POST", "/tokenize", operations.tokenize),
    Endpoint("POST", "/detokenize", operations.detokenize),
    Endpoint("GET", "/version", operations.version, "public"),
    Endpoint("GET", "/load", operations.load, "operator"),
    Endpoint("GET", "/health", operations.health, "public"),
    # Amazon SageMaker's name.
    Endpoint("GET", "/ping", operations.health, "public", hidden=True),
    Endpoint("POST", "/ping", operations.health, "public", hidden=True),
    Endpoint("GET", "/ready", operations.ready, "public"),
    Endpoint("GET", "/metrics", operations.metrics, "public"),
    Endpoint("GET", "/experts", operations.experts, "operator"),
    Endpoint("GET", "/compiler", operations.compiler, "operator", dict[str, Any]),
    Endpoint("GET", "/compiler/report", operations.compiler_page, "operator", hidden=True),
    Endpoint("POST", "/reset_prefix_cache", operations.reset_prefix_cache, "operator"),
    Endpoint("POST", "/v1/load_lora_adapter", lora.load_adapter, "operator"),
    Endpoint("POST", "/v1/unload_lora_adapter", lora.unload_adapter, "operator"),
    Endpoint("POST", "/sleep", operations.sleep, "operator"),
    Endpoint("POST", "/wake_up", operations.wake_up, "operator"),
    Endpoint("GET", "/is_sleeping", operations.is_sleeping, "operator"),
    Endpoint("POST", "/start_profile", operations.start_profile, "operator"),
    Endpoint("POST", "/stop_profile", operations.stop_profile, "operator"),
)


def _paths(caller: str) -> frozenset[str]:
    return frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.caller == caller)


# The page at / is static; it loads its data from /status, which needs a key.
# The schema describes every server of this version.
OPEN_PATHS = frozenset({"/", "/openapi.json", *docs_page.PATHS}) | _paths("public")
OPERATION_PATHS = frozenset({"/status"}) | _paths("operator")


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
        lambda: openapi_schema(app, import_module("atomc").__version__, ENDPOINTS)
    )
    app.router.route_class = checked_json_route(lambda: service.model.max_len)
    for endpoint in ENDPOINTS:
        _add_route(app, endpoint, service)
    app.include_router(status.router(service))
    app.include_router(docs_page.router())
    for kind in (APIError, EngineDead, RequestRefused, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_disconnect)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    # Lone surrogates in a text; which code raises the error depends on the field.
    app.add_exception_handler(UnicodeError, _answer_unicode_error)
    config = service.config
    authenticated = AuthMiddleware(
        BodyBudgetMiddleware(
            ImageBudgetMiddleware(app, service.image_budget),
            config.max_body_bytes,
            config.max_bodies_bytes,
        ),
        keys=ApiKeys(config.api_key, config.admin_key),
        # A page that was rebound to this server has no key.
        pages=WebPages(config.allow_origin, None if config.api_key else config.allow_host),
        open_paths=OPEN_PATHS,
        operation_paths=OPERATION_PATHS,
        error_format=ERROR_FORMAT,
        count_error=lambda code: service.metrics.refused.labels(service.metrics.model, code).inc(),
    )
    timed = TurnsMiddleware(
        BodyTimeoutMiddleware(UnreadBodyMiddleware(authenticated), config.body_timeout),
        service.turns,
    )
    if not config.allow_origin:
        return timed
    return CORSMiddleware(
        timed,
        allow_origins=config.allow_origin,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", IGNORED_FIELDS],
    )


def _add_route(app: FastAPI, endpoint: Endpoint, service: Service) -> None:
    """A body is checked for unknown fields before the endpoint runs."""
    run = partial(endpoint.run, service)

    async def answer(**values: object) -> Response:
        body, request = values.get("body"), values.get("request")
        if isinstance(body, BaseModel) and isinstance(request, Request):
            check_unknown_fields(body, request, strict=service.config.strict_requests)
        result = await run(**values)
        return result if isinstance(result, Response) else JSONResponse(result)

    answer.__signature__ = signature(run).replace(  # type: ignore[attr-defined]
        return_annotation=Response
    )
    app.add_api_route(
        endpoint.path,
        answer,
        methods=[endpoint.method],
        name=endpoint.run.__name__,
        include_in_schema=not endpoint.hidden,
        responses=error_responses(AnthropicError) if ERROR_FORMAT.applies(endpoint.path) else None,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    return APIErrorResponse(client_error(error))


async def _answer_disconnect(request: Request, error: Exception) -> Response:
    """The client has disconnected: the response is discarded and not counted as an error."""
    return Response()


async def _answer_validation_error(request: Request, error: Exception) -> Response:
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
        return APIErrorResponse(
            APIError(400, f"{got}: send JSON with the header 'Content-Type: application/json'")
        )
    if first["type"] == "json_invalid":
        return APIErrorResponse(APIError(400, f"the body is not JSON: {first['ctx']['error']}"))
    return APIErrorResponse(invalid_field(location, first["msg"]))


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if isinstance(
        error.__cause__, APIError
    ):  # raised by the middleware while FastAPI reads the body
        return APIErrorResponse(error.__cause__)
    message = (
        f"no endpoint {request.method} {request.url.path}"
        if error.status_code in (404, 405)
        else str(error.detail)
    )
    return APIErrorResponse(APIError(error.status_code, message, headers=error.headers))


async def _answer_unicode_error(request: Request, error: Exception) -> Response:
    return APIErrorResponse(
        APIError(400, "the body has text that is not valid Unicode, such as a lone surrogate")
    )
