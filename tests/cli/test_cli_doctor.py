"""`sluiceway doctor`: what it makes of each fact, and what it finds on servers that are well and that are not."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path

import pytest

from sluiceway.client import Client
from sluiceway.contract.problem_answers import ProblemInfo, ProblemList
from sluiceway.kernel.errors import SluicewayError
from sluiceway.model.instances import ClusterInfo, InstanceInfo
from sluiceway.server_cli import doctor, doctor_checks
from sluiceway.server_cli.doctor_checks import MIN_FREE, OTHER_FILES, Check
from tests.cli.cli_shell import Shell
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import ServerProcess, closed_port, wait_until

NOW = datetime(2026, 1, 31, 8, 0, 0, 500_000, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Shell:
    return Shell("", monkeypatch, capsysbinary)


def found(shell: Shell, *arguments: str) -> tuple[int, dict[str, Check]]:
    """The exit code, and the checks by name."""
    code, out, err = shell.ends("doctor", "--json", *arguments)
    assert err == ""
    document = json.loads(out)
    assert document["healthy"] == (code == 0)
    return code, {each["name"]: Check(**each) for each in document["checks"]}


# -- what it makes of each fact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("check", "state"),
    [
        (doctor_checks.transport("http://localhost:2319", None, NOW), "ok"),
        (doctor_checks.transport("http://127.0.0.9:2319", None, NOW), "ok"),
        (doctor_checks.transport("http://[::1]:2319", None, NOW), "ok"),
        (doctor_checks.transport("http://10.0.0.1:2319", None, NOW), "failed"),
        (doctor_checks.transport("http://localhost.example", None, NOW), "failed"),
        (doctor_checks.transport("https://queue.example", None, NOW), "ok"),
        (doctor_checks.transport("https://queue.example", NOW + timedelta(days=14), NOW), "ok"),
        (doctor_checks.transport("https://queue.example", NOW + timedelta(days=13), NOW), "warning"),
        (doctor_checks.versions("1.0", "1.0"), "ok"),
        (doctor_checks.versions("1.1", "1.0"), "warning"),
        (doctor_checks.versions(None, "1.0"), "warning"),
        (doctor_checks.readiness([]), "ok"),
        (doctor_checks.readiness(["partition 1 does not serve"]), "failed"),
        (doctor_checks.cluster({"a": "alive", "b": "leaving"}), "ok"),
        (doctor_checks.cluster({"a": "alive", "b": "silent"}), "warning"),
        (doctor_checks.cluster({"a": "joining", "b": "alive"}), "warning"),
        (doctor_checks.disk("/data", MIN_FREE, 100 * MIN_FREE), "ok"),
        (doctor_checks.disk("/data", MIN_FREE - 1, 100 * MIN_FREE), "failed"),
        (doctor_checks.disk("/data", MIN_FREE - 1, MIN_FREE), "ok"),
        (doctor_checks.files(OTHER_FILES + 30, 10), "ok"),
        (doctor_checks.files(OTHER_FILES + 29, 10), "failed"),
        (doctor_checks.files(-1, 10**6), "ok"),
        (doctor_checks.exposed("127.0.0.1:2319", False, False), "ok"),
        (doctor_checks.exposed(":2319", False, False), "ok"),
        (doctor_checks.exposed("[::1]:2319", False, False), "ok"),
        (doctor_checks.exposed("0.0.0.0:2319", False, True), "failed"),
        (doctor_checks.exposed("[::]:2319", False, True), "failed"),
        (doctor_checks.exposed("0.0.0.0:2319", True, False), "failed"),
        (doctor_checks.exposed("0.0.0.0:2319", True, True), "ok"),
        (doctor_checks.accepted(False, [], None, NOW), "ok"),
        (doctor_checks.accepted(True, ["read:*"], None, NOW), "ok"),
        (doctor_checks.accepted(True, ["read:*"], NOW + timedelta(days=14), NOW), "ok"),
        (doctor_checks.accepted(True, ["read:*"], NOW + timedelta(days=13), NOW), "warning"),
        (doctor_checks.refused(SluicewayError("unauthenticated", ""), False), "failed"),
        (doctor_checks.refused(SluicewayError("unauthenticated", ""), True), "failed"),
    ],
)
def test_each_fact_is_fine_or_there_is_something_to_do(check: Check, state: str) -> None:
    assert check.state == state
    assert bool(check.fix) == (state in ("warning", "failed"))


@pytest.mark.parametrize(
    ("server", "state"),
    [
        (NOW, "ok"),
        # Its header is cut to whole seconds, so it may seem a second late.
        (NOW - 5.9 * SECOND, "ok"),
        (NOW - 6.1 * SECOND, "failed"),
        (NOW + 5.9 * SECOND, "ok"),
        (NOW + 6.1 * SECOND, "failed"),
        (None, "skipped"),
    ],
)
def test_a_slow_answer_is_no_skew(server: datetime | None, state: str) -> None:
    check = doctor_checks.clock(server, NOW, NOW + SECOND)
    assert check.state == state
    if state == "failed":
        assert ("behind" if server is not None and server < NOW else "ahead of") in check.detail


def test_an_unknown_certificate_says_what_to_name() -> None:
    error = SluicewayError("unavailable", "the certificate of https://x is not trusted: self-signed certificate")
    assert "--ca-file" in doctor_checks.unreachable(error, "https://x").fix


# -- what it finds ----------------------------------------------------------------------------------------------------


def test_no_server_is_3_and_says_how_to_start_one(shell: Shell) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}"
        code, out, _ = shell.ends("doctor", "--url", url)
        assert code == 3
        assert f"cannot reach {url}" in out
        assert "fix server: start a server: sluiceway dev" in out
        code, by_name = found(shell, "--url", url)
    assert code == 3
    assert "key" not in by_name


def test_a_broken_choice_of_server_is_a_failed_check(shell: Shell) -> None:
    code, by_name = found(shell, "--context", "unknown")
    assert (code, by_name["target"].state) == (3, "failed")


def test_partitions_that_do_not_serve_are_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    service = FakeService()
    monkeypatch.setattr(service, "problems", lambda: ["partition 1 of q does not serve"])
    with serving(service) as url:
        code, by_name = found(shell, "--url", url)
    assert (code, by_name["ready"].state) == (3, "failed")
    assert "partition 1 of q" in by_name["ready"].detail


def test_an_instance_that_another_does_not_hear_of_is_told(shell: Shell) -> None:
    service = FakeService()
    instances = [InstanceInfo("a", "http://a", True, "alive"), InstanceInfo("b", "http://b", False, "silent", 9_000)]
    service.instances.script = [ClusterInfo(instances[:1], "static", 1, 11, 11), ClusterInfo(instances, "rounds", 2, 11, 11)]
    with serving(service) as url:
        assert "cluster" not in found(shell, "--url", url)[1]
        check = found(shell, "--url", url)[1]["cluster"]
    assert (check.state, check.detail) == ("warning", "2 instances: b is silent")


def test_a_data_folder_and_a_configuration(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "sluiceway.toml"
    file.write_text('[server]\nlisten = "0.0.0.0:2319"\n')
    partitions = tmp_path / "data" / "partitions"
    partitions.mkdir(parents=True)
    for n in range(3):
        (partitions / f"k7f3q2ma-{n}.sqlite").touch()
    with serving(FakeService()) as url:
        _, by_name = found(shell, "--url", url, "--data", str(tmp_path / "data"), "--config", str(file))
        assert "3 partitions need about" in by_name["files"].detail
        assert by_name["disk"].name == "disk"
        assert (by_name["config"].state, by_name["listen"].state) == ("ok", "failed")
        assert "tls_certificate" in by_name["listen"].fix
        file.write_text("[server]\nlisten = 1\n")
        code, by_name = found(shell, "--url", url, "--data", str(tmp_path / "gone"), "--config", str(file))
        assert code == 3
        assert (by_name["data"].state, by_name["config"].state) == ("failed", "failed")
        assert "listen" in by_name["config"].detail


def test_without_spark_no_java_is_needed_and_with_it_a_missing_one_is_told(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise SluicewayError("invalid_request", "no Java was found", "JAVA_HOME")

    with serving(FakeService()) as url:
        monkeypatch.setattr(import_module("sluiceway.spark.session"), "find_java_home", missing)
        assert found(shell, "--url", url)[1]["java"].state == "failed"
        monkeypatch.setattr(doctor, "find_spec", lambda name: None)
        assert found(shell, "--url", url)[1]["java"].state == "skipped"


def test_what_the_judge_finds_comes_as_checks_with_the_command_that_mends_it() -> None:
    now = datetime.now(UTC)
    poison = ProblemInfo(
        kind="poison_item", severity="warning", subject="q", message="1 item fails", cause="offset 7", command="mend", since=now
    )
    down = ProblemInfo(kind="backend_down", severity="critical", subject="db", message="no answer", command="look", since=now)
    checks = list(doctor_checks.judged(ProblemList(items=[down, poison], queues=3, silent=["i2"])))
    assert [(each.name, each.state, each.detail, each.fix) for each in checks] == [
        ("backend_down", "failed", "db: no answer", "look"),
        ("poison_item", "warning", "q: 1 item fails. Cause: offset 7", "mend"),
        ("problems", "warning", "instance i2 did not answer, so its problems are not known", "sluiceway instance list"),
    ]
    (good,) = doctor_checks.judged(ProblemList(queues=3))
    assert (good.state, good.detail) == ("ok", "none in 3 queues")
    (early,) = doctor_checks.judged(ProblemList(queues=3, watched=False))
    assert early.state == "skipped"


def test_doctor_tells_problems_first_and_fails_on_a_critical_one(shell: Shell, tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "data") as server, Client(server.url) as client:
        client.create_queue("q")
        client.produce("q", ["x"])

        def names() -> list[str]:
            for _ in range(12):
                client.retry("q", [item.id for item in client.lease("q").items])
            (told,) = [json.loads(line) for line in shell.ends("doctor", "--url", server.url, "--json")[1].splitlines()]
            return [each["name"] for each in told["checks"]]

        wait_until(lambda: "failure_rate" in names(), "the failures are found")
        code, out, _ = shell.ends("doctor", "--url", server.url)
        assert code == 3
        assert out.split()[:2] == ["failed", "failure_rate"]
        assert "fix failure_rate: sluiceway queue pause q --lease" in out
