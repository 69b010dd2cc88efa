"""A command's target server, credentials and connection."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import click

from sluiceway.cli.common import DEFAULT_URL, Failure, Output, duration_option, from_root, json_option
from sluiceway.cli.contexts import Contexts, contexts_file, read_contexts
from sluiceway.kernel.errors import SluicewayError, invalid
from sluiceway.kernel.secrets import read_secret

if TYPE_CHECKING:
    from sluiceway.client import Client
    from sluiceway.client.connections import Connections
    from sluiceway.client.http_messages import Answer

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])
COMPLETION_PATIENCE = 1.0
"""Maximum seconds that shell completion waits for queue names."""


@dataclass(frozen=True, slots=True)
class Target:
    """The server and credentials of a command. `origin` names the option, variable or context that they came from."""

    url: str
    api_key: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    origin: str = "the default"


@dataclass(frozen=True, slots=True)
class Flags:
    """The target options of the command line."""

    url: str | None = None
    context: str | None = None
    ca_file: str | None = None


def flags(url: str | None, context: str | None, ca_file: str | None) -> Flags:
    """The options of a command, or those given before it: `sluiceway --url URL queue list`."""
    if url is None and context is None:
        url, context = (cast("str | None", from_root(name)) for name in ("url", "context_name"))
    return Flags(url, context, ca_file or cast("str | None", from_root("ca_file")))


def choose(flags: Flags, environment: Mapping[str, str], contexts: Callable[[], Contexts]) -> Target:
    """The target from the options, else the environment, else the current context, else the default.

    A context's key is only sent to that context's URL. Raises `invalid_request` for conflicting choices, an unknown context, and an
    unreadable key.
    """
    if flags.url and flags.context:
        raise click.UsageError("--url and --context exclude each other")
    key, ca_file = environment.get("SLUICEWAY_API_KEY") or None, flags.ca_file or environment.get("SLUICEWAY_CA_FILE") or None
    if flags.url:
        return Target(flags.url, key, ca_file, "--url")
    url, name = environment.get("SLUICEWAY_URL"), environment.get("SLUICEWAY_CONTEXT")
    if not flags.context:
        if url and name:
            raise invalid("context", "SLUICEWAY_URL and SLUICEWAY_CONTEXT are both set; unset one of them")
        if url:
            return Target(url, key, ca_file, "SLUICEWAY_URL")
    known = contexts()
    chosen = flags.context or name or known.current
    if not chosen:
        return Target(DEFAULT_URL, key, ca_file)
    context = known.get(chosen)
    own = None
    if context.api_key is not None and not (key and not flags.context):
        own = read_secret(context.api_key, "api_key", environment) or context.api_key
    return Target(context.url, own or key, ca_file or context.ca_file, f"the context {chosen}")


class Session(Output):
    """A command's connection, opened at first use, and its output."""

    def __init__(self, flags: Flags, as_json: bool, client_id: str = "cli", retry_for: str = "0s") -> None:
        super().__init__(as_json)
        self._flags, self._client_id, self._retry_for = flags, client_id, retry_for
        self._client: Client | None = None
        self._connections: Connections | None = None
        self._target: Target | None = None

    @property
    def target(self) -> Target:
        """Raises as `choose` does."""
        if self._target is None:
            self._target = chosen_target(self._flags)
        return self._target

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = connect(self.target, self._client_id, self._retry_for)
        return self._client

    def get(self, path: str) -> Answer:
        """The answer to a GET request, whatever its status. Raises `unavailable`, and `outcome_unknown` without an answer."""
        from sluiceway.client.connections import CONNECT_TIMEOUT, Connections
        from sluiceway.client.http_exchange import Endpoint
        from sluiceway.client.http_messages import ExchangeError

        endpoint = Endpoint(self.target.url, self.target.api_key or "")
        if self._connections is None:
            self._connections = Connections(endpoint.context(self.target.ca_file))
        try:
            return self._connections.exchange(endpoint.get(path, CONNECT_TIMEOUT))
        except ExchangeError as error:
            raise endpoint.broken(error) from error

    def problems(self) -> list[str]:
        """The server's readiness problems; empty if it is ready."""
        from sluiceway.client.protocol import read_problem

        answer = self.get("/readyz")
        try:
            told = json.loads(answer.body)
            return [] if told["ready"] else [str(each) for each in told["problems"]] or ["the server is not ready"]
        except (ValueError, KeyError, TypeError):
            raise read_problem(answer.status, answer.body) from None

    def close(self) -> None:
        for each in (self._client, self._connections):
            if each is not None:
                each.close()

    def failed(self, error: SluicewayError, done: str = "") -> Failure:
        """The failure for this error; `done` says what was completed before it."""
        return Failure(error, self._target.url if self._target else "", self.as_json, done)

    def fail(self, error: SluicewayError, count: int, done: str) -> NoReturn:
        """End the command with this error; `done` describes the `count` items that were completed before it."""
        raise self.failed(error, f"{count:,} {done}" if count else "") from error


def server_options(command: F) -> F:
    """Adds the options that choose the server."""
    for option in (
        click.option("--ca-file", type=click.Path(dir_okay=False), help="Certificate authorities to trust. [env: SLUICEWAY_CA_FILE]"),
        click.option("--context", "context_name", metavar="NAME", help="Context with the server. [env: SLUICEWAY_CONTEXT]"),
        click.option("--url", help=f"Server URL. [env: SLUICEWAY_URL; default: the current context, else {DEFAULT_URL}]"),
    ):
        command = option(command)
    return command


def chosen_target(flags: Flags) -> Target:
    return choose(flags, os.environ, lambda: read_contexts(contexts_file()))


def paused_verbs(session: Session, queue: str) -> list[str]:
    """The paused verbs of the queue; empty if the key may not read them."""
    try:
        return session.client.queue_info(queue).paused
    except SluicewayError:
        return []


def connected(command: Callable[..., T]) -> Callable[..., T]:
    """Decorates a command with a server: adds the common options, and passes a `Session` as the first argument."""

    @server_options
    @json_option
    @duration_option("--retry-for", default="0s", help="Retry safely repeatable calls for this long.")
    @functools.wraps(command)
    def run(url: str | None, context_name: str | None, ca_file: str | None, as_json: bool, retry_for: str, **options: object) -> T:
        as_json = as_json or bool(from_root("as_json"))
        session = Session(flags(url, context_name, ca_file), as_json, str(options.get("client_id") or "cli"), retry_for)
        try:
            with contextlib.closing(session):
                return command(session, **options)
        except SluicewayError as error:
            raise session.failed(error) from error

    return run


def connect(target: Target, client_id: str = "cli", retry_for: str = "0s") -> Client:
    from sluiceway.client import Client

    return Client(target.url, client_id=client_id, retry_for=retry_for, api_key=target.api_key or "", ca_file=target.ca_file)


# -- completion of names ----------------------------------------------------------------------------------------------


def queue_argument(name: str = "queue") -> Callable[[F], F]:
    """Adds a queue name argument with shell completion."""
    return click.argument(name, shell_complete=queue_names)


def queue_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The server's queues with this prefix; empty without a prompt answer."""
    found: list[str] = []

    def ask(client: Client) -> None:
        with contextlib.suppress(SluicewayError), client:
            found.extend(info.queue_name for info in client.list_queues(pivot=incomplete or None, limit=1_000).items)

    try:
        client = connect(chosen_target(Flags(*(ctx.params.get(name) for name in ("url", "context_name", "ca_file")))))
    except (SluicewayError, click.UsageError):
        return []
    # In a thread, because host name resolution has no timeout.
    asking = threading.Thread(target=ask, args=(client,), daemon=True)
    asking.start()
    asking.join(COMPLETION_PATIENCE)
    return [name for name in list(found) if name.startswith(incomplete)]
