"""A port, and the process that serves on it until it is told to end. The only door to uvicorn."""

from __future__ import annotations

import errno
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uvicorn import Server

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
LAST_WORDS_S = 5.0  # for responses, once the engine is closed


def require_packages() -> None:
    """Refuse to serve without the packages that it takes.

    Raises:
        ValueError: one is missing; with the command that installs it.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"serving needs {' and '.join(missing)}: pip install 'jaxpp-toolkit[serve]'")


def bind(host: str, port: int) -> socket.socket:
    """Take a port; clients that come before `serve` wait.

    Args:
        host: a name or address of this machine.
        port: 0: a free one.

    Raises:
        ValueError: it is taken, not ours to take, or the host is not this machine.
    """
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port}: 0 to 65535 is needed")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"host {host}: {error.strerror}; give an address of this machine with --host") from error
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # past connections do not hold it
        taken.bind(address)
        taken.listen(2048)  # before that, another process could bind it too
    except OSError as error:
        taken.close()
        raise ValueError(_reason(error, host, port)) from error
    return taken


def _reason(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use; choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} is for the administrator; choose one from 1024 on with --port"
    return f"host {host}, port {port}: {error.strerror}; give an address of this machine with --host"


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def server(app: Any, engine: Any, *, drain_s: float = 30.0, ready: Callable[[], None] = lambda: None) -> Server:
    """Return the server of an application; ``run(sockets=[socket])`` serves until a signal or ``stop()``.

    The first SIGTERM or SIGINT lets running requests end for `drain_s`: health says 503, new ones are refused. Then,
    or at the second signal, what still runs is cancelled.

    Args:
        app: of `make_app`.
        engine: it is closed at the end.
        drain_s: for what runs.
        ready: called once requests are taken.
    """
    import uvicorn

    class Draining(uvicorn.Server):
        closer: threading.Thread | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets=sockets)
            ready()

        def handle_exit(self, sig: int, frame: Any) -> None:
            # uvicorn's own would close the port at once, so that nobody could ask for its health, and end by the
            # signal instead of with exit code 0.
            self.stop(drain_s)

        def stop(self, seconds: float = drain_s) -> None:
            app.state.service.is_closing = True
            if self.closer is None:
                self.closer = threading.Thread(target=self._close, args=(seconds,), daemon=True)
                self.closer.start()
            else:
                threading.Thread(target=engine.close, args=(0.0,), daemon=True).start()

        def _close(self, seconds: float) -> None:
            try:
                engine.close(seconds)
            finally:
                self.should_exit = True

    config = uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", lifespan="off",
                            timeout_graceful_shutdown=int(LAST_WORDS_S))  # fmt: skip
    return Draining(config)


def serve(app: Any, engine: Any, port: socket.socket, drain_s: float, ready: Callable[[], None]) -> None:
    """Serve until a signal; see `server`."""
    running = server(app, engine, drain_s=drain_s, ready=ready)
    # Signals may come before uvicorn listens for them.
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, running.handle_exit)
    try:
        running.run(sockets=[port])
    finally:
        port.close()
        engine.close(0.0)
