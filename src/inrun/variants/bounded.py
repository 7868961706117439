"""An HTTP client whose requests have a deadline and whose replies have a largest size.

The HTTP library's own timeouts are per read: a server that sends a byte now and then keeps a
request open forever. Here one deadline covers connecting, sending and the whole reply.
"""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import openai

LARGEST = 8 << 20  # bytes of a reply, unpacked; a reply of a hundred variants has some thousands
REDIRECTS = 5
ENCODINGS = ("gzip", "deflate")  # they unpack to a thousandfold at most; others have no bound


class ReplyTooLargeError(openai.OpenAIError):
    """The reply is longer than any honest one; asking again would not help."""


def bounded_client(seconds: float, largest: int = LARGEST) -> Any:
    """openai's own HTTP client with a deadline for each request and a limit for each reply.

    Each try has its own deadline, so that retries work as openai does them.
    """
    base: Any = openai.DefaultAsyncHttpxClient
    http = import_module(base.__mro__[1].__module__.partition(".")[0])  # httpx, or its successor

    class Client(base):  # type: ignore[misc]
        async def send(self, request: Any, **how: Any) -> Any:
            try:
                return await asyncio.wait_for(self._whole(request, **how), seconds)
            except (TimeoutError, asyncio.TimeoutError):
                raise http.ReadTimeout("the deadline passed", request=request) from None

        async def _whole(self, request: Any, **how: Any) -> Any:
            """The response with all of its body."""
            request.headers["accept-encoding"] = ", ".join(ENCODINGS)
            response = await self._followed(request, how | {"stream": True})
            try:
                packed = response.headers.get("content-encoding", "identity")
                if packed.strip().lower() not in ("identity", *ENCODINGS):
                    raise http.DecodingError(f"a reply packed as {packed!r}", request=request)
                body = bytearray()
                async for piece in response.aiter_bytes(1 << 16):
                    body += piece
                    if len(body) > largest:
                        raise ReplyTooLargeError(
                            f"sent more than {largest >> 20} MB, which is no reply to a question; "
                            "is --base-url right?"
                        )
            finally:
                await response.aclose()
            headers, content = _headers_of_unpacked(response), bytes(body)
            return http.Response(
                response.status_code, headers=headers, content=content, request=request
            )

        async def _followed(self, request: Any, how: dict[str, Any]) -> Any:
            """The response after redirects, none of whose bodies is read: they have no bound."""
            response = await super().send(request, **how | {"follow_redirects": False})
            for _ in range(REDIRECTS):
                if response.next_request is None:
                    break
                await response.aclose()
                response = await super().send(
                    response.next_request, **how | {"follow_redirects": False}
                )
            return response

    return Client()


def _headers_of_unpacked(response: Any) -> list[tuple[str, str]]:
    """The headers of a response, without those that describe its body as it was sent."""
    packing = ("content-encoding", "content-length", "transfer-encoding")
    return [(k, v) for k, v in response.headers.multi_items() if k.lower() not in packing]
