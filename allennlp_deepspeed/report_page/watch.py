from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import List, Type

from allennlp.common.checks import ConfigurationError
from overrides import overrides

from allennlp_deepspeed.report_page.page import page

_LOCALHOST = "127.0.0.1"
_REFRESH_SECONDS = 10


def server(directories: List[str], port: int) -> ThreadingHTTPServer:
    """
    # Parameters

    directories : `List[str]`, required.
        Serialization directories.
    port : `int`, required.
        On this machine. 0 for any that is free.

    # Returns

    `ThreadingHTTPServer`
        Serves the page of the runs to this machine only, as they are when a browser asks for it or
        reloads it. To be started by `serve_forever`.

    # Raises

    `ConfigurationError`
        If the port can't be had.
    """
    try:
        return ThreadingHTTPServer((_LOCALHOST, port), _handler(directories))
    except (OSError, OverflowError) as error:
        raise ConfigurationError(
            f"--port {port} can't be used ({error}): give another one, or leave it out."
        ) from error


def _handler(directories: List[str]) -> Type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A name that leads to this machine from elsewhere shows nothing.
            host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
            if host not in (_LOCALHOST, "localhost"):
                self.send_error(HTTPStatus.FORBIDDEN)
            elif self.path == "/":
                try:
                    self._answer(page(directories, refresh=_REFRESH_SECONDS))
                except ConfigurationError as error:
                    self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=error.message)
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

        def _answer(self, html: str) -> None:
            body = html.encode()
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        @overrides
        def log_message(self, format: str, *args: object) -> None:
            """Without a line on the console for each request."""

    return Handler
