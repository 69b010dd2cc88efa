"""What lies in deploy/ fits the server: its metrics, its configuration and its commands."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml
from prometheus_client.parser import text_string_to_metric_families

import sluiceway
from sluiceway.client.http_exchange import DEFAULT_URL
from sluiceway.instance.configuration import load
from sluiceway.instance.problem_watch import ProblemWatch
from sluiceway.instance.service import Service
from sluiceway.local.backend import OPEN_TIMEOUT
from sluiceway.model.bucket_prices import S3_STANDARD
from sluiceway.model.configuration import ServerSettings
from sluiceway.model.problems import Problem, Problems
from sluiceway.server.app import Fittings
from sluiceway.server.metrics import Metrics
from sluiceway.worker import Options
from tests.server.server_process import wait_until
from tests.server.server_running import running

NAME = re.compile(r"\b(?:sluiceway|process)_[a-z_]+\b")
MATCHER = re.compile(r"(\w+)\{(?!\{)([^}]*)\}|by \(([^)]*)\)|\{\{ ?\$labels\.(\w+) ?\}\}|\{\{(\w+)\}\}")
JUDGED = {"sluiceway_disk_low", "sluiceway_clock_ahead_seconds"}
"""The server watches them itself, as `disk_full` and `clock_wrong` of `sluiceway_problem`."""
FROM_PROMETHEUS = {"instance", "job", "le"}


@pytest.fixture(scope="module")
def deploy() -> Path:
    return Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample that a server with a queue has to show."""
    made: list[Metrics] = []

    def fit(service: Any) -> Fittings:
        made.append(Metrics(service))
        # A server without buckets has no samples of theirs.
        service.bucket_requests.of("bucket", S3_STANDARD).outcomes["get", "throttled"] += 1
        service.bucket_requests.of("bucket", S3_STANDARD).latencies["get"].add(0.1)
        return Fittings(meters=made, pages=made[0].pages())

    data, wrong = tmp_path_factory.mktemp("data"), Problem("no_consumer", "warning", "q", "q", "", "", "", "", 0)
    with pytest.MonkeyPatch.context() as patch, running(data, fit, functools.partial(Service, disk_reserve=1 << 20)) as server:
        # A healthy server has no sample of this one.
        patch.setattr(ProblemWatch, "here", lambda *_: Problems((wrong,), True))
        server.queue()
        text = server.http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def rules(deploy: Path) -> list[dict[str, Any]]:
    groups = yaml.safe_load((deploy / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels(deploy: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((deploy / "grafana/sluiceway.json").read_text())["panels"]
    return found


def expressions(deploy: Path) -> Iterator[tuple[str, str]]:
    """Each with the texts in which labels of its result are used."""
    for rule in rules(deploy):
        yield rule["expr"], rule["annotations"]["summary"]
    for panel in panels(deploy):
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in json.loads((deploy / "grafana/sluiceway.json").read_text())["templating"]["list"][1:]:
        yield variable["query"]["query"], ""


def test_every_metric_that_is_named_is_one_of_the_server(deploy: Path, exposed: dict[str, set[str]]) -> None:
    named = {name for expression, _ in expressions(deploy) for name in NAME.findall(expression)}
    assert len(named) > 25
    assert named - exposed.keys() == set()


def test_and_every_metric_of_the_server_is_shown_or_watched(deploy: Path, exposed: dict[str, set[str]]) -> None:
    named = {name for expression, _ in expressions(deploy) for name in NAME.findall(expression)}
    own = {name for name in exposed if name.startswith("sluiceway_") and not name.endswith(("_bucket", "_sum", "_count"))}
    assert own - named == JUDGED


def test_every_label_that_is_used_is_one_of_the_metric(deploy: Path, exposed: dict[str, set[str]]) -> None:
    for expression, text in expressions(deploy):
        labels = set().union(*(exposed[name] for name in NAME.findall(expression))) | FROM_PROMETHEUS
        used: set[str] = set()
        for _, matchers, grouped, summary, legend in MATCHER.findall(f"{expression} | {text}"):
            used |= {each.split("=")[0].split("!")[0].strip() for each in matchers.split(",") if each.strip()}
            used |= {each.strip() for each in grouped.split(",") if each.strip()}
            used |= {each for each in (summary, legend) if each}
        assert used <= labels, expression


def test_states_that_are_asked_for_exist(deploy: Path, tmp_path: Path) -> None:
    with running(tmp_path, lambda service: Fittings(pages=Metrics(service).pages())) as server:
        server.queue()
        text = server.http.get("/metrics").text
    for expression, _ in expressions(deploy):
        for name, state in re.findall(r'(\w+)\{[^}]*state!?="(\w+)"', expression):
            assert re.search(rf'^{name}\{{.*state="{state}"', text, re.MULTILINE), expression


def test_every_alert_is_explained(deploy: Path) -> None:
    operations = (deploy.parent / "docs/guides/operations.md").read_text()
    alerts = [rule["alert"] for rule in rules(deploy)]
    assert len(set(alerts)) == len(alerts) > 10
    assert [alert for alert in alerts if f"`{alert}`" not in operations] == []
    assert {rule["labels"]["severity"] for rule in rules(deploy)} == {"page", "warn"}


def test_every_alert_that_a_page_names_is_there(deploy: Path) -> None:
    alerts = {rule["alert"] for rule in rules(deploy)}
    pages = [page for folder in ("guides", "reference", "explanation") for page in (deploy.parent / "docs" / folder).glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(Sluiceway[A-Z][A-Za-z]+)`", page.read_text())}
    assert named - alerts == {"SluicewayError"}  # the exception


def test_no_two_panels_lie_on_each_other(deploy: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels(deploy):
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in panels(deploy)}) == len(panels(deploy))


def test_the_unit_is_one_that_systemd_takes(deploy: Path, tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("there is no systemd-analyze here")
    unit = (deploy / "systemd/sluiceway.service").read_text()
    command = Path(sys.executable).with_name("sluiceway")
    assert "/opt/sluiceway/bin/sluiceway" in unit
    (tmp_path / "sluiceway.service").write_text(unit.replace("/opt/sluiceway/bin/sluiceway", str(command)))
    result = subprocess.run([program, "verify", "--man=no", tmp_path / "sluiceway.service"], capture_output=True, text=True, check=False)
    assert "sluiceway.service" not in result.stderr, result.stderr
    assert result.returncode == 0, result.stderr


def test_the_units_command_is_one_that_the_program_takes(deploy: Path) -> None:
    unit = (deploy / "systemd/sluiceway.service").read_text()
    line = next(line for line in unit.splitlines() if line.startswith("ExecStart="))
    options = re.findall(r"--[a-z-]+", line)
    shown = subprocess.run([sys.executable, "-m", "sluiceway.cli.main", "serve", "--help"], capture_output=True, text=True, check=True)
    assert options
    assert [option for option in options if f"{option} " not in shown.stdout] == []


def test_the_configuration_is_one_that_the_server_takes(deploy: Path, tmp_path: Path) -> None:
    secret = tmp_path / "admin_key"
    secret.write_text("5ecre7" * 8)
    text = (deploy / "systemd/sluiceway.toml").read_text()
    path = "/run/credentials/sluiceway.service/admin_key"
    assert path in text
    (tmp_path / "sluiceway.toml").write_text(text.replace(path, str(secret)))
    server = load(tmp_path / "sluiceway.toml", {}).configuration.server
    assert (server.listen, server.admin_listen, server.admin_key) == ("0.0.0.0:2319", "127.0.0.1:2320", "5ecre7" * 8)


def test_the_containers_environment_is_one_that_the_server_takes(deploy: Path, tmp_path: Path) -> None:
    compose = yaml.safe_load((deploy / "container/compose.yaml").read_text())
    container = (deploy / "container/Containerfile").read_text()
    environment = dict(re.findall(r"(SLUICEWAY_\w+)=(\S+)", container))
    assert environment["SLUICEWAY_SERVER__LISTEN"] == "0.0.0.0:2319"
    secrets = {"admin_key": "5ecre7" * 8, "postgres_url": "postgresql://u:5ecre7@postgres/sluiceway"}
    for name, value in secrets.items():
        (tmp_path / name).write_text(value)
    for name, value in compose["services"]["sluiceway"]["environment"].items():
        environment[name] = value.replace("/run/secrets", str(tmp_path))
    configuration = load(None, environment).configuration
    assert configuration.log.format == "json"
    assert configuration.server.admin_key == secrets["admin_key"]
    assert vars_of(configuration.backends["shared"])["url"] == secrets["postgres_url"]
    named = set(compose["services"]["sluiceway"]["secrets"]) | set(compose["services"]["postgres"]["secrets"])
    assert named == compose["secrets"].keys()


def vars_of(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


def test_what_the_image_is_made_of_is_there(deploy: Path) -> None:
    container = (deploy / "container/Containerfile").read_text()
    copied = set(" ".join(re.findall(r"^COPY (?!--from)(.+) \S+$", container, re.MULTILINE)).split())
    assert copied == {"wheels", "requirements.txt", "healthcheck.py"}, "tools/image.py makes these"
    assert (deploy / "container/healthcheck.py").exists()
    assert re.search(r"^USER (\d+):\d+$", container, re.MULTILINE), "a number: Kubernetes must see that it is not root"
    assert (deploy / "container/compose.yaml").read_text().splitlines()[0].count("NOT RUN as a whole") == 1


def test_the_image_and_its_healthcheck_agree(deploy: Path) -> None:
    container = (deploy / "container/Containerfile").read_text()
    line = re.search(r"^ENTRYPOINT (\[.*\])$", container, re.MULTILINE)
    assert line is not None
    command = json.loads(line[1])
    assert command[:2] == ["sluiceway", "serve"]
    written = command[command.index("--url-file") + 1]
    assert f'Path("{written}")' in (deploy / "container/healthcheck.py").read_text()
    assert written.startswith(f"{command[command.index('--data') + 1]}/")
    assert f"VOLUME {command[command.index('--data') + 1]}\n" in container


@pytest.mark.parametrize("tls", [False, True])
def test_the_healthcheck_follows_the_server(deploy: Path, tmp_path: Path, tls: bool) -> None:
    script = (deploy / "container/healthcheck.py").read_text().replace("/data/url", str(tmp_path / "url"))
    check = [sys.executable, "-I", "-c", script]
    arguments: list[str | Path] = ["--data", tmp_path / "data", "--listen", "127.0.0.1:0", "--url-file", tmp_path / "url"]
    if tls:
        certificate = trustme.CA().issue_cert("elsewhere.example")
        certificate.private_key_pem.write_to_path(tmp_path / "key")
        certificate.cert_chain_pems[0].write_to_path(tmp_path / "certificate")
        arguments += ["--tls-certificate", tmp_path / "certificate", "--tls-key", tmp_path / "key"]
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0, "not yet started"
    server = subprocess.Popen([sys.executable, "-m", "sluiceway.cli.main", "serve", *arguments], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "url").exists() or server.poll() is not None, "the server's URL")
        assert (tmp_path / "url").read_text().startswith("https:" if tls else "http:")
        done = subprocess.run(check, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        server.terminate()
        server.wait()
    assert subprocess.run(check, capture_output=True, check=False).returncode != 0, "stopped"


@pytest.fixture(scope="module")
def chart(deploy: Path) -> Path:
    return deploy / "helm/sluiceway"


@pytest.fixture(scope="module")
def values(chart: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((chart / "values.yaml").read_text())
    return found


def test_the_chart_is_of_this_release(chart: Path) -> None:
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert described["appVersion"] == sluiceway.__version__
    assert described["version"] == sluiceway.__version__.replace(".dev0", "-dev0"), "Helm wants SemVer"


def test_the_charts_schema_has_every_value(chart: Path, values: dict[str, Any]) -> None:
    def compare(given: Any, schema: dict[str, Any], path: str) -> None:
        if schema.get("additionalProperties") is False:
            assert given.keys() == schema["properties"].keys() - {"global"}, path
            for name, value in given.items():
                compare(value, schema["properties"][name], f"{path}.{name}")

    schema = json.loads((chart / "values.schema.json").read_text())
    compare(values, schema, "values")
    properties = schema["properties"]
    assert properties["workers"]["additionalProperties"] == properties["workerDefaults"], "a worker has the defaults' settings"


def test_every_value_that_the_chart_uses_exists_and_is_used(chart: Path, values: dict[str, Any]) -> None:
    text = "".join(path.read_text() for path in (chart / "templates").iterdir())
    used = {name.split(".")[0] for name in re.findall(r"\.Values\.([\w.]+)", text)}
    assert used == values.keys()
    used = {name.split(".")[0] for name in re.findall(r"\$worker\.([\w.]+)", text)}
    assert used == values["workerDefaults"].keys()


def test_ci_values_are_ones_that_the_chart_has(chart: Path, values: dict[str, Any]) -> None:
    examples = sorted((chart / "ci").glob("*.yaml"))
    assert len(examples) >= 3
    for path in examples:
        given = yaml.safe_load(path.read_text())
        assert given.keys() <= values.keys(), path.name
        for worker in given.get("workers", {}).values():
            assert worker.keys() <= values["workerDefaults"].keys(), path.name


def test_grace_periods_are_longer_than_what_they_are_for(deploy: Path, chart: Path, values: dict[str, Any]) -> None:
    server = (chart / "templates/statefulset.yaml").read_text()
    before = re.search(r'preStop: \{exec: \{command: \[sleep, "(\d+)"\]\}\}', server)
    assert before is not None
    slowest = ServerSettings().shutdown_timeout / 1000 + OPEN_TIMEOUT / 1000
    assert values["terminationGracePeriodSeconds"] > int(before[1]) + slowest
    compose = yaml.safe_load((deploy / "container/compose.yaml").read_text())["services"]["sluiceway"]
    assert int(compose["stop_grace_period"].removesuffix("s")) > slowest
    assert f"{values['workerDefaults']['shutdownTimeout']}s" == Options(queue_name="emails").shutdown_timeout
    assert "terminationGracePeriodSeconds: {{ add $worker.shutdownTimeout 15 }}" in (chart / "templates/workers.yaml").read_text()


def test_probes_and_ports_are_ones_that_exist(chart: Path, tmp_path: Path) -> None:
    server, workers = ((chart / f"templates/{name}.yaml").read_text() for name in ("statefulset", "workers"))
    with running(tmp_path) as started:
        for path in set(re.findall(r"httpGet: \{path: (/\w+)", server)):
            assert started.http.get(path).status_code == 200, path
    assert set(re.findall(r"httpGet: \{path: (/\w+)", server)) == {"/livez", "/readyz"}
    assert set(re.findall(r"httpGet: \{path: (/\w+)", workers)) == {"/healthz", "/readyz"}
    ports = set(re.findall(r"\b2\d{3}\b", "".join(path.read_text() for path in (chart / "templates").glob("s*.yaml"))))
    assert ports == {DEFAULT_URL.rpartition(":")[2]}


def test_the_charts_commands_are_ones_that_the_program_takes(chart: Path) -> None:
    for name, command in (("statefulset", "serve"), ("workers", "work")):
        text = (chart / f"templates/{name}.yaml").read_text()
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+(?=[=, \n])", re.sub(r"#.*", "", text)))
        shown = subprocess.run([sys.executable, "-m", "sluiceway.cli.main", command, "--help"], capture_output=True, text=True, check=True)
        assert len(options) > 1
        assert [option for option in options if option not in shown.stdout] == []


def test_nothing_runs_with_more_rights_than_it_needs(deploy: Path) -> None:
    users = re.findall(r"^USER (\S+)$", (deploy / "container/Containerfile").read_text(), re.MULTILINE)
    assert users == ["10001:10001"]
    text = (deploy / "container/compose.yaml").read_text()
    assert "mkdir -m 0700 secrets" in text
    compose = yaml.safe_load(text)["services"]["sluiceway"]
    assert (compose["read_only"], compose["cap_drop"], compose["security_opt"]) == (True, ["ALL"], ["no-new-privileges:true"])
    assert all(each.startswith("127.0.0.1:") for each in compose["ports"])
    pod = yaml.safe_load((deploy / "kubernetes/worker.yaml").read_text())["spec"]["template"]["spec"]
    helpers = (deploy / "helm/sluiceway/templates/_helpers.tpl").read_text()
    parts = dict(re.findall(r'define "sluiceway\.(podSecurity|containerSecurity)" -\}\}\n(.*?)\{\{- end', helpers, re.DOTALL))
    of_chart = {name: yaml.safe_load(text) for name, text in parts.items()}
    for found, container in ((pod, pod["containers"][0]), (of_chart["podSecurity"], of_chart["containerSecurity"])):
        assert found["automountServiceAccountToken"] is False
        assert found["securityContext"]["runAsNonRoot"] is True
        assert found["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        context = container["securityContext"]
        assert (context["allowPrivilegeEscalation"], context["readOnlyRootFilesystem"]) == (False, True)
        assert context["capabilities"] == {"drop": ["ALL"]}
    for name in ("statefulset.yaml", "workers.yaml"):
        template = (deploy / "helm/sluiceway/templates" / name).read_text()
        assert template.count("sluiceway.podSecurity") == template.count("sluiceway.containerSecurity") == 1, name
    for name in ("sluiceway.service", "sluiceway-worker.service"):
        unit = (deploy / "systemd" / name).read_text().splitlines()
        assert {"DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="} <= {*unit}
