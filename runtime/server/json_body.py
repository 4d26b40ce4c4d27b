"""Parses JSON bodies after checking their size and nesting depth."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from atomc.runtime.server.errors import invalid
from atomc.runtime.server.limits import check_json

# Larger bodies are checked in a thread.
THREAD_BYTES = 2**18


def checked_json_route(max_len: Callable[[], int]) -> type[APIRoute]:
    """A route class that checks bodies. max_len: returns the maximum sequence length in tokens."""

    class CheckedRequest(Request):
        async def json(self) -> Any:
            """Raises APIError, or JSONDecodeError if the body is not JSON."""
            if not hasattr(self, "_json"):
                body = await self.body()
                if len(body) > THREAD_BYTES:
                    await asyncio.to_thread(check_json, body, max_len())
                else:
                    check_json(body, max_len())
                try:
                    self._json = json.loads(body)
                except RecursionError as error:
                    raise invalid("the body is nested too deeply") from error
                except UnicodeDecodeError as error:
                    raise invalid("the body is not JSON: it is not UTF-8") from error
                except json.JSONDecodeError:
                    raise
                except ValueError as error:  # an integer with more digits than Python converts
                    raise invalid(f"the body cannot be parsed: {error}") from error
            return self._json

    class CheckedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_checked(request: Request) -> Response:
                return await handle(CheckedRequest(request.scope, request.receive))

            return handle_checked

    return CheckedRoute
