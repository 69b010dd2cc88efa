"""Builds the container image and runs the first hour with it: `make test-image`.

Needs root, podman and mmdebstrap (the base image is made of Debian's packages); on Debian the make target installs them. Containers run
with a read-only root file system, no capabilities, and no network but their own loopback. With Helm (`make test-chart` brings it), the pods
of the chart run, too: the commands, environment and mounts that Kubernetes would give them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import trustme

import chart
import image

ENGINE = image.Engine("podman", own=True)
HARDENED = ["--read-only", "--read-only-tmpfs=false", "--tmpfs", "/tmp", "--cap-drop", "all", "--security-opt", "no-new-privileges"]
MAX_BYTES = 400e6
STOP_TIMEOUT = 30
START_TIMEOUT = 60.0
PAGE = "import ssl, urllib.request as r; print(r.urlopen('{}', context=ssl._create_unverified_context()).read().decode())"
METRICS = """
import ssl, urllib.request as r
asked = r.Request("{}", headers={{"Authorization": "Bearer {}"}})
print(r.urlopen(asked, context=ssl._create_unverified_context()).read().decode())
"""
HANDLER = "def greet(item):\n    print('greeted', item.payload.decode(), flush=True)\n"


class Container:
    """A running container. `arguments`: what follows the image's name."""

    def __init__(self, *options: str, arguments: tuple[str, ...] = ()) -> None:
        every = [*HARDENED, *ENGINE.limits(), "--detach", *options]
        self.name = engine("run", *every, image.TAG, *arguments).stdout.split()[-1]

    def run(self, *command: str, code: int = 0) -> str:
        """Run a command in the container and return what it prints. It must end with this code."""
        return engine("exec", *self._key(), self.name, *command, code=code).stdout

    def starts(self, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*ENGINE.command, "exec", *self._key(), self.name, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    key = ""

    def _key(self) -> list[str]:
        return ["--env", f"SLUICEWAY_API_KEY={self.key}"] if self.key else []

    def is_healthy(self) -> bool:
        return engine("healthcheck", "run", self.name, code=None).returncode == 0

    def logs(self) -> str:
        done = engine("logs", self.name)
        return done.stdout + done.stderr

    def state(self, field: str) -> str:
        return engine("inspect", "--format", f"{{{{.State.{field}}}}}", self.name).stdout.strip()

    def remove(self) -> None:
        engine("rm", "--force", "--time", "1", self.name)

    def stop(self) -> float:
        """Stop the container with the image's signal, see that it exits with 0, and return the seconds that it took."""
        began = time.monotonic()
        engine("stop", "--time", str(STOP_TIMEOUT), self.name)
        took = time.monotonic() - began
        assert self.state("ExitCode") == "0", self.logs()
        return took


def engine(*arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*ENGINE.command, *arguments], capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def wait(what: str, holds: Callable[[], bool], container: Container) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {START_TIMEOUT:g} s\n{container.logs()}"
        assert container.state("Running") == "true", container.logs()
        time.sleep(0.3)


@contextlib.contextmanager
def started(*options: str, network: str = "none") -> Iterator[Container]:
    container = Container("--network", network, *options)
    try:
        wait("healthy", container.is_healthy, container)
        yield container
    finally:
        container.remove()


def check_image() -> None:
    """Its user, volume, signal and healthcheck are set."""
    (found,) = json.loads(engine("image", "inspect", image.TAG).stdout)
    config = found["Config"]
    assert config["User"] == "10001:10001"
    assert config["StopSignal"] in ("15", "SIGTERM")
    assert list(config["Volumes"]) == ["/data"]
    assert config["Entrypoint"][:2] == ["sluiceway", "serve"]
    assert config.get("Healthcheck") or found.get("Healthcheck")
    base = json.loads(engine("image", "inspect", f"localhost/sluiceway-base:{image.SUITE}").stdout)[0]["Size"]
    print(f"  {found['Size'] / 1e6:.0f} MB, {base / 1e6:.0f} MB of it the base")
    assert found["Size"] < MAX_BYTES


def check_confinement(server: Container) -> None:
    """It is not root, has no capabilities, and cannot write to its root file system."""
    assert server.run("id", "-u").strip() == "10001"
    status = dict(line.split(":", 1) for line in server.run("cat", "/proc/1/status").splitlines())
    assert status["Uid"].split() == ["10001"] * 4
    assert int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    for place in ("/x", "/opt/sluiceway/x", "/etc/x"):
        server.run("touch", place, code=1)
    assert server.run("stat", "-c", "%a %u", "/data").split() == ["700", "10001"]


def tour(server: Container, url: str, *, ca: str | None = None) -> None:
    """First key, queue, produce, lease, complete, dashboard."""
    reach = ["--url", url, *(["--ca-file", ca] if ca else [])]

    def cli(*words: str) -> str:
        return server.run("sluiceway", words[0], *words[1:], *reach)

    assert "unauthenticated" in engine("exec", server.name, "sluiceway", "queue", "list", *reach, "--json", code=None).stderr
    scopes = [word for each in ("admin", "manage:*", "produce:*", "consume:*", "read:*") for word in ("--scope", each)]
    server.key = server.run("sluiceway", "key", "create", "ops", *scopes, "--data", "/data").strip()
    cli("queue", "create", "orders")
    cli("produce", "orders", "one", "two", "three")
    leased = [json.loads(line) for line in cli("lease", "orders", "-n", "2", "--json").splitlines()]
    assert [each["utf8"] for each in leased] == ["one", "two"]
    cli("complete", "orders", leased[0]["id"])
    counts = json.loads(cli("stats", "orders", "--json"))
    partitions = [each for part in counts["logical_queues"] for each in part["partitions"]]
    assert sum(each["completed"] for each in partitions) == 1
    assert sum(each["total"] for each in partitions) == 2
    page = server.run("python", "-c", PAGE.format(f"{url.replace('localhost', '127.0.0.1')}/ui"))
    assert "<html" in page
    assert "Sluiceway" in page


def check_plain(work: Path) -> None:
    """The tour over HTTP, a worker beside it, a stop with a waiting consumer, and a second start on the same volume."""
    url = "http://127.0.0.1:2319"
    with started("--volume", "sluiceway-tour:/data") as server:
        check_confinement(server)
        tour(server, url)
        check_worker(server, work, url)
        waiting = server.starts("sluiceway", "lease", "orders", "--wait", "60s", "--url", url)
        wait("a waiting consumer", lambda: '"lease_waiting":1' in server.run("sluiceway", "stats", "orders", "--json"), server)
        took = server.stop()
        assert "the server is stopping" in waiting.communicate()[1], "its call gets an answer"
        assert took < STOP_TIMEOUT / 2, f"it drains; it is not killed: {took:.1f} s"
        assert '"stopped"' in server.logs()
        print(f"  stopped in {took:.1f} s, with a consumer waiting")
        key = server.key
    with started("--volume", "sluiceway-tour:/data") as server:
        server.key = key
        assert "orders" in server.run("sluiceway", "queue", "list")
        # A process that does not answer is unhealthy.
        process = int(server.state("Pid"))
        os.kill(process, signal.SIGSTOP)
        assert not server.is_healthy()
        os.kill(process, signal.SIGCONT)
        wait("healthy again", server.is_healthy, server)


def check_worker(server: Container, work: Path, url: str) -> None:
    """A worker runs from the same image, with a handler beside it, and stops with 0."""
    (work / "tasks.py").write_text(HANDLER)
    mount = ["--volume", f"{work}:/app:ro", "--workdir", "/app", "--network", f"container:{server.name}", "--entrypoint", "sluiceway"]
    access = ["--env", f"SLUICEWAY_API_KEY={server.key}", "--env", f"SLUICEWAY_URL={url}"]
    worker = Container(*mount, *access, "--no-healthcheck", arguments=("work", "tasks:greet", "--queue", "orders"))
    try:
        wait("an item handled", lambda: "greeted three" in worker.logs(), worker)
        worker.stop()
    finally:
        worker.remove()


def check_tls(work: Path) -> None:
    """The same over TLS: the healthcheck follows."""
    issue(work, "localhost")
    named = {"SLUICEWAY_SERVER__TLS_CERTIFICATE": "/tls/tls.crt", "SLUICEWAY_SERVER__TLS_KEY": "/tls/tls.key"}
    options = [word for name, value in named.items() for word in ("--env", f"{name}={value}")]
    with started("--volume", f"{work}:/tls:ro", *options) as server:
        assert server.run("cat", "/data/url").startswith("https://")
        tour(server, "https://localhost:2319", ca="/tls/ca.crt")
        server.stop()


def issue(work: Path, *hosts: str) -> None:
    """Write a certificate, its key and its authority, named as in a Secret of type kubernetes.io/tls."""
    authority = trustme.CA()
    certificate = authority.issue_cert(*hosts)
    authority.cert_pem.write_to_path(work / "ca.crt")
    certificate.private_key_pem.write_to_path(work / "tls.key")
    for each in certificate.cert_chain_pems:
        each.write_to_path(work / "tls.crt", append=True)
    for path in work.iterdir():
        path.chmod(0o444)


def check_workers(_: Path) -> None:
    """Several processes: the first one passes the signal on."""
    with started("--env", "SLUICEWAY_SERVER__WORKERS=2") as server:
        tour(server, "http://127.0.0.1:2319")
        server.stop()


def check_chart(work: Path) -> None:
    """One server of the chart with TLS, its worker, and what KEDA reads."""
    documents = chart.rendered(chart.CHART / "ci/scaled.yaml", chart.VERSIONS[-1])
    prepare(work, documents, f"127.0.0.1 localhost {HOST}\n")
    (work / "app").mkdir()
    (work / "app/tasks.py").write_text(HANDLER.replace("greet", "send_email", 1))
    templates = dict(chart.pods(documents))
    server = Container(*pod(templates["q-sluiceway"], work), "--network", "none", arguments=args(templates["q-sluiceway"]))
    try:
        wait("the server's readiness probe", lambda: probe(server, templates["q-sluiceway"], "readinessProbe"), server)
        assert probe(server, templates["q-sluiceway"], "livenessProbe")
        keys = first_keys(server, HOST)
        server.key = keys["operator"]
        server.run("sluiceway", "queue", "create", "emails", *reach(HOST))
        server.run("sluiceway", "produce", "emails", "one", *reach(HOST))
        (trigger,) = chart.named(documents, "ScaledObject")["q-sluiceway-emails"]["spec"]["triggers"]
        page = trigger["metadata"]["url"].partition(":2319")[2]
        depth = json.loads(server.run("python", "-c", METRICS.format(f"https://{HOST}:2319{page}", server.key)))
        assert depth[trigger["metadata"]["valueLocation"]] == 1, "KEDA reads it"
        template = templates["q-sluiceway-emails"]
        more = ["--network", f"container:{server.name}", "--env", f"SLUICEWAY_API_KEY={keys['consumer']}"]
        mount = ["--volume", f"{work / 'app'}:/app:ro", "--workdir", "/app"]
        worker = Container(*pod(template, work), *more, *mount, arguments=args(template))
        try:
            wait("an item handled", lambda: "greeted one" in worker.logs(), worker)
            wait("the worker's readiness probe", lambda: probe(worker, template, "readinessProbe"), worker)
            assert probe(worker, template, "livenessProbe")
            worker.stop()
        finally:
            worker.remove()
        server.stop()
    finally:
        server.remove()


def check_cluster(work: Path) -> None:
    """Three instances of the chart with TLS, on a real PostgreSQL, one of which is stopped. They share a network, so each has an address of
    its own on loopback; their names and ports are those of the chart."""
    sys.path.insert(0, str(image.ROOT))
    from tests.servers.postgres_server import PostgresServer

    documents = chart.rendered(chart.CHART / "ci/full.yaml", chart.VERSIONS[-1])
    names = {f"q-sluiceway-{number}": f"127.0.0.{number + 2}" for number in range(3)}
    lines = [f"{address} {name}.q-sluiceway-peers.prod.svc {HOST}\n" for name, address in names.items()]
    prepare(work, documents, "".join(["127.0.0.1 localhost\n", *lines]))
    template = dict(chart.pods(documents))["q-sluiceway"]
    (work / "pg").mkdir()
    (work / "pg").chmod(0o777)
    with PostgresServer(settings={"unix_socket_directories": str(work / "pg")}) as postgres, contextlib.ExitStack() as stack:
        told = dict(each.split("=", 1) for each in postgres.dsn().split())
        url = f"postgresql://sluiceway:{told['password']}@/sluiceway?host=/pg&port={postgres.port}"
        for secret in ("meta-url", "partitions-url"):
            (work / "secrets" / secret).write_text(url)
        instances: dict[str, Container] = {}
        for name, address in names.items():
            network = f"container:{next(iter(instances.values())).name}" if instances else "none"
            (work / name).mkdir()
            (work / name).chmod(0o777)
            advertise = f"SLUICEWAY_CLUSTER__ADVERTISE=https://{name}.q-sluiceway-peers.prod.svc:2319"
            listen = f"SLUICEWAY_SERVER__LISTEN={address}:2319"
            own = ["--env", advertise, "--env", listen, "--volume", f"{work / 'pg'}:/pg", "--network", network]
            instances[name] = Container(*pod(template, work, data=work / name), *own, arguments=args(template))
            stack.callback(instances[name].remove)
        for name, each in instances.items():
            wait(f"{name}'s readiness", lambda: probe(each, template, "readinessProbe", names[name]), each)  # noqa: B023
        first, second, third = instances.values()
        hosts = [f"{name}.q-sluiceway-peers.prod.svc" for name in names]
        first.key = second.key = third.key = first_keys(first, hosts[0])["operator"]
        assert all(name in first.run("sluiceway", "instance", "list", *reach(hosts[0])) for name in names)
        first.run("sluiceway", "queue", "create", "emails", "--partitions", "6", *reach(hosts[0]))
        for number in range(6):
            first.run("sluiceway", "produce", "emails", f"mail {number}", *reach(hosts[number % 3]))
        second.stop()
        mails: set[str] = set()

        def lease() -> bool:
            """Lease and complete what is there, through the third; true once all items came."""
            lines = third.run("sluiceway", "lease", "emails", "-n", "10", "--wait", "1s", "--json", *reach(hosts[2])).splitlines()
            if leased := [json.loads(line) for line in lines]:
                third.run("sluiceway", "complete", "emails", *(each["id"] for each in leased), *reach(hosts[0]))
            mails.update(each["utf8"] for each in leased)
            return len(mails) == 6

        wait("every item", lease, third)
        wait("the first one's readiness", lambda: probe(first, template, "readinessProbe", names["q-sluiceway-0"]), first)
        third.stop()
        first.stop()


HOST = "q-sluiceway.prod.svc"
ADMIN = "5ecre7" * 8


def prepare(work: Path, documents: list[chart.Document], hosts: str) -> None:
    """Write what the pods mount: Secrets, the ConfigMap, and volumes as `fsGroup` makes them. `hosts`: in place of the cluster's DNS."""
    for name in ("data", "tls", "secrets", "config"):
        (work / name).mkdir()
    issue(work / "tls", HOST, "*.q-sluiceway-peers.prod.svc")
    (work / "secrets/admin-key").write_text(ADMIN + "\n")
    (work / "config/sluiceway.toml").write_text(chart.named(documents, "ConfigMap")["q-sluiceway"]["data"]["sluiceway.toml"])
    (work / "hosts").write_text(hosts)
    os.chown(work / "data", 0, 10001)
    (work / "data").chmod(0o2775)


def reach(host: str) -> list[str]:
    return ["--url", f"https://{host}:2319", "--ca-file", "/run/secrets/tls/ca.crt"]


def first_keys(server: Container, host: str) -> dict[str, str]:
    """Make an operator's and a consumer's key with the administrator's."""
    server.key = ADMIN
    scopes = {"operator": ["manage:*", "produce:*", "consume:*", "read:*"], "consumer": ["consume:emails"]}
    return {
        name: server.run("sluiceway", "key", "create", name, *(word for each in given for word in ("--scope", each)), *reach(host)).strip()
        for name, given in scopes.items()
    }


def pod(template: chart.Document, work: Path, data: Path | None = None) -> list[str]:
    """The options that make a container of the pod's: its user, environment and mounts. `data`: its own volume."""
    (container,) = template["spec"]["containers"]
    security = template["spec"]["securityContext"]
    options = ["--user", f"{security['runAsUser']}:{security['runAsGroup']}", "--no-healthcheck", "--entrypoint", container["command"][0]]
    options += ["--volume", f"{work / 'hosts'}:/etc/hosts:ro"]
    for each in container["env"]:
        options += ["--env", f"{each['name']}={each['value']}"] if "value" in each else []
    for mount in container["volumeMounts"]:
        if mount["name"] != "tmp":
            source = data if data and mount["name"] == "data" else work / mount["name"]
            options += ["--volume", f"{source}:{mount['mountPath']}{':ro' if mount.get('readOnly') else ''}"]
    return options


def args(template: chart.Document) -> tuple[str, ...]:
    (container,) = template["spec"]["containers"]
    return (*container["command"][1:], *container["args"])


def probe(container: Container, template: chart.Document, which: str, address: str = "127.0.0.1") -> bool:
    """Ask as the kubelet does: by address, without a check of the certificate."""
    (told,) = template["spec"]["containers"]
    asked = told[which]["httpGet"]
    url = f"{asked.get('scheme', 'HTTP').lower()}://{address}:{told['ports'][0]['containerPort']}{asked['path']}"
    return engine("exec", container.name, "python", "-c", PAGE.format(url), code=None).returncode == 0


def main() -> None:
    missing = [name for name in ("podman", "mmdebstrap") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        print(f"SKIPPED: test-image needs root, podman and mmdebstrap; missing: {', '.join(missing) or 'root'}", file=sys.stderr)
        sys.exit(0)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="take the image of the run before")
    parser.add_argument("--only", help="one part, such as tls")
    given = parser.parse_args()
    if not given.no_build:
        image.context()
        ENGINE.build(image.base_of_packages(ENGINE), image.TAG)
    engine("volume", "rm", "--force", "sluiceway-tour")
    print("image", flush=True)
    check_image()
    checks = {"plain": check_plain, "tls": check_tls, "processes": check_workers}
    if chart.has_helm():
        checks |= {"chart": check_chart, "cluster": check_cluster}
    else:
        print("SKIPPED: the pods of the chart, as Helm is not here; make test-chart brings it", file=sys.stderr)
    chosen = {name: check for name, check in checks.items() if given.only in (None, name)}
    for name, check in chosen.items():
        print(name, flush=True)
        with tempfile.TemporaryDirectory() as work:
            Path(work).chmod(0o755)
            check(Path(work))
    engine("volume", "rm", "--force", "sluiceway-tour")
    print(f"{len(chosen) + 1} passed, 0 failed")


if __name__ == "__main__":
    main()
