"""A local HTTP server that speaks the chat completions protocol, well and badly."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-very-secret"


def completion(content, finish="stop", refusal=None):
    """A 200 with one choice."""
    message = {"role": "assistant", "content": content, "refusal": refusal}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {
        "id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]
    }  # fmt: skip


class Status(Exception):  # noqa: N818
    """An HTTP error as an answer."""

    def __init__(self, code, message="no", **headers):
        self.code, self.message, self.headers = code, message, headers


class ChatServer:
    """``answer(source, request)`` gives the body for a request; each request is kept."""

    def __init__(self, answer):
        self.answer = answer
        self.requests = []
        self.keys = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.keys.append(self.headers["Authorization"])
                outer.requests.append(request)
                try:
                    body, code, headers = outer.answer(outer.source(request), request), 200, {}
                except Status as status:
                    body, code, headers = (
                        {"error": {"message": status.message, "type": "x"}},
                        status.code,
                        status.headers,
                    )
                if callable(body):  # says it in its own way
                    with contextlib.suppress(OSError):
                        body(self)
                    self.close_connection = True
                    return
                kind = "application/json" if isinstance(body, dict) else "text/html"
                text = (json.dumps(body) if isinstance(body, dict) else body).encode()
                try:
                    self.send_response(code if self.path == "/v1/chat/completions" else 404)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(text)))
                    for name, value in headers.items():
                        self.send_header(name.replace("_", "-"), value)
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:  # the client did not wait
                    pass

            def log_message(self, *args):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @staticmethod
    def source(request):
        return request["messages"][1]["content"].split("z_star:\n")[-1]

    def asked(self, text):
        """How often a source was asked about."""
        return sum(self.source(r) == text for r in self.requests)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def slow(seconds, body):
    time.sleep(seconds)
    return body


def drip(body, pause=0.1, headers=True):
    """The whole answer in the end, a byte at a time; ``headers``: they come at once."""

    def send(handler):
        text = json.dumps(body).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
        message = f"{head}\r\n\r\n".encode() + text
        if headers:
            handler.wfile.write(message[: -len(text)])
            message = text
        for i in range(len(message)):
            handler.wfile.write(message[i : i + 1])
            time.sleep(pause if i < 60 else 0)  # does not go on for ever: a test would not end

    return send


def flood(content, times, encoding=None):
    """``times`` copies of some bytes, without an end that was announced."""

    def send(handler):
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        if encoding:
            handler.send_header("Content-Encoding", encoding)
        handler.end_headers()
        for _ in range(times):
            handler.wfile.write(content)

    return send
