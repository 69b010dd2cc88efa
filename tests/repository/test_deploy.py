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
import yaml
from prometheus_client.parser import text_string_to_metric_families

from sluiceway.instance.configuration import load
from sluiceway.instance.problem_watch import ProblemWatch
from sluiceway.instance.service import Service
from sluiceway.model.problems import Problem, Problems
from sluiceway.server.app import Fittings
from sluiceway.server.metrics import Metrics
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


def test_what_the_container_copies_is_there_and_what_was_not_run_says_so(deploy: Path) -> None:
    container = (deploy / "container/Containerfile").read_text()
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", container, re.MULTILINE):
        for source in line.split():
            assert (deploy.parent / source).exists(), source
    for name in ("container/Containerfile", "container/compose.yaml"):
        assert (deploy / name).read_text().startswith("# NOT RUN")
