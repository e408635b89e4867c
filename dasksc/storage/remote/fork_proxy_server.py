"""Program of the helper process that makes requests for a forked process; see `dasksc.storage.remote.fork_proxy`."""

from __future__ import annotations

import os
import socket
import sys
import threading

from dasksc.storage.remote.connecting import client_of
from dasksc.storage.remote.fork_proxy import receive, send


def _serve(connection: socket.socket) -> None:
    """Serve the requests of one thread until it closes the connection."""
    while True:
        try:
            root, options, method, args, kwargs = receive(connection)
        except (EOFError, OSError):
            return
        try:
            answer = getattr(client_of(root, options), method)(*args, **kwargs)
            if method == "get":
                answer = bytes(answer[0]), answer[1]
        except Exception as error:  # sent back to the caller
            answer = error.with_traceback(None)
        send(connection, answer)


def _main(number: int) -> None:
    control = socket.socket(fileno=number)
    while True:
        message, numbers, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            # Exit without waiting for threads, which may be waiting for a remote server.
            os._exit(0)
        for one in numbers:
            threading.Thread(target=_serve, args=(socket.socket(fileno=one),), daemon=True).start()


if __name__ == "__main__":
    _main(int(sys.argv[1]))
