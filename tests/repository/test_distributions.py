"""The two distributions: what is in each, and that the client's works in an environment that has nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from itertools import islice
from pathlib import Path
from textwrap import dedent
from urllib.request import urlopen

import pytest

import sluiceway
from sluiceway import testing


@pytest.fixture(scope="module")
def wheels(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels by distribution."""
    into = tmp_path_factory.mktemp("wheels")
    return {"sluiceway": built(repository, "wheel", into), "sluiceway-client": built(repository / "client", "wheel", into)}


def built(project: Path, kind: str, into: Path) -> Path:
    before = set(into.iterdir())
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(into)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = set(into.iterdir()) - before
    return made


def files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_each_file_is_in_one_of_them(repository: Path, wheels: dict[str, Path]) -> None:
    server, client = files(wheels["sluiceway"]), files(wheels["sluiceway-client"])
    assert not server & client
    source = repository / "src"
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=repository, capture_output=True, text=True, check=True).stdout.split()
    there = {str(Path(name).relative_to("src")) for name in tracked if (repository / name).exists()}
    assert there <= server | client
    assert all((source / name).exists() for name in server | client)


def test_the_server_does_not_repeat_what_the_client_depends_on(repository: Path) -> None:
    dependencies = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["dependencies"]
    assert not [each for each in dependencies if re.match(r"(click|msgspec|prometheus-client)\b", each)]


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.mark.parametrize("name", ["sluiceway", "sluiceway-client"])
def test_the_metadata_say_what_it_is(wheels: dict[str, Path], name: str) -> None:
    said = metadata(wheels[name])
    assert (said["Name"], said["Version"]) == (name, sluiceway.__version__)
    assert said["Summary"]
    urls = dict(each.split(", ", 1) for each in said.get_all("Project-URL", []))
    assert {"Homepage", "Documentation", "Changelog", "Issues", "Source"} <= set(urls)
    assert all(url.startswith(sluiceway.REPOSITORY) for url in urls.values())
    classifiers = said.get_all("Classifier", [])
    assert {"Typing :: Typed", *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13))} <= set(classifiers)
    assert not [each for each in classifiers if each.startswith("License")], "PEP 639: the license expression alone"
    assert "queue" in said["Keywords"]


@pytest.mark.parametrize(("name", "folder"), [("sluiceway", "."), ("sluiceway-client", "client")])
def test_links_of_the_readme_work_on_an_index(repository: Path, wheels: dict[str, Path], name: str, folder: str) -> None:
    said = metadata(wheels[name])
    assert said["Description-Content-Type"] == "text/markdown"
    content = said.get_payload(decode=True)
    assert isinstance(content, bytes)
    text = content.decode()
    ours = [path for path in re.findall(rf"\]\({re.escape(sluiceway.REPOSITORY)}/(?:blob|raw)/[^/]+/([^)#]+)", text) if path]
    assert ours
    assert not [path for path in ours if not (repository / path).exists()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    assert not [target for target in re.findall(r"\]\(([^)]+)\)", prose) if not re.match("https?:|#", target)]
    here = re.sub(r"\]\([^)]+\)", "", (repository / folder / "README.md").read_text())
    assert re.sub(r"\]\([^)]+\)", "", text).strip() == here.strip(), "nothing but the links differs"


def test_the_address_is_written_once(repository: Path) -> None:
    """And in the issue forms, which cannot read the constant."""
    listed = subprocess.run(["git", "grep", "-l", "-I", sluiceway.REPOSITORY], cwd=repository, capture_output=True, text=True, check=False)
    assert set(listed.stdout.split()) <= {"src/sluiceway/__init__.py", ".github/ISSUE_TEMPLATE/config.yml"}


def test_the_clients_source_distribution_makes_the_same_wheel(repository: Path, wheels: dict[str, Path], tmp_path: Path) -> None:
    with tarfile.open(built(repository / "client", "sdist", tmp_path)) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    (tmp_path / "again").mkdir()
    with zipfile.ZipFile(built(source, "wheel", tmp_path / "again")) as again, zipfile.ZipFile(wheels["sluiceway-client"]) as first:
        assert {each.filename: each.CRC for each in again.infolist() if not each.filename.endswith("RECORD")} == {
            each.filename: each.CRC for each in first.infolist() if not each.filename.endswith("RECORD")
        }


def installed(repository: Path, wheels: list[Path], place: Path, *options: str) -> Path:
    """The programs of a new environment with these wheels, and the dependencies that the lock file has for the last one."""
    uv = repository / ".tools/bin/uv"
    if not uv.exists():
        pytest.skip("uv is not here: the environment was not made by `make setup`")
    package = "sluiceway-client" if wheels[-1].name.startswith("sluiceway_client") else "sluiceway"
    export = [uv, "export", "--locked", "--package", package, "--no-dev", "--no-emit-workspace", "--quiet", "-o", place / "needs.txt"]
    ran(*export, cwd=repository)
    ran(uv, "venv", "--quiet", "--python", sys.executable, place / "venv")
    target = ["--python", place / "venv/bin/python", "--quiet", *options]
    ran(uv, "pip", "install", *target, "--requirement", place / "needs.txt")
    ran(uv, "pip", "install", *target, "--no-deps", *wheels)
    return place / "venv/bin"


@pytest.fixture(scope="module")
def alone(repository: Path, wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the client's wheel. With bytecode, as pip installs."""
    place = tmp_path_factory.mktemp("client")
    return installed(repository, [wheels["sluiceway-client"]], place, "--link-mode", "copy", "--compile-bytecode")


def ran(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "COVERAGE_PROCESS_START")}
    environment |= {"UV_SYSTEM_CERTS": "1", "UV_PYTHON_DOWNLOADS": "never"}
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, check=False, env=environment, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done  # type: ignore[no-any-return]


def python(alone: Path, code: str) -> str:
    return ran(alone / "python", "-I", "-c", code).stdout


def test_the_client_alone_produces_leases_and_works(alone: Path, tmp_path: Path) -> None:
    # Async, so in one thread: two threads that print write their lines into each other.
    (tmp_path / "tasks.py").write_text("async def resize(item):\n    print('resized', item.json()['name'], flush=True)\n")
    with testing.server() as server:
        server.client.create_queue("resize")
        code = f"""
            from sluiceway.client import Client
            with Client({server.url!r}) as client:
                client.produce("resize", [{{"name": "a.png"}}])
                with client.producer("resize") as producer:
                    producer.send({{"name": "b.png"}})
                print(len(client.peek("resize")))
        """
        assert python(alone, dedent(code)).split() == ["2"]
        named: list[str | Path] = [alone / "sluiceway", "--url", server.url]
        assert json.loads(ran(*named, "--json", "stats", "resize").stdout)["queue_name"] == "resize"
        worker = subprocess.Popen(
            [*named, "work", "tasks:resize"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert worker.stdout is not None
            names = {line.split()[1] for line in islice((line for line in worker.stdout if line.startswith("resized")), 2)}
            assert names == {"a.png", "b.png"}
        finally:
            worker.terminate()
            worker.communicate()
        assert worker.returncode == 0


def test_the_client_alone_says_what_it_does_not_have(alone: Path) -> None:
    code = "import sluiceway.client, sluiceway.worker, sys; print({'numpy', 'pyarrow', 'uvicorn'} & {*sys.modules})"
    assert python(alone, code) == "set()\n"
    with pytest.raises(AssertionError, match=re.escape("Arrow tables need pyarrow: pip install 'sluiceway-client[arrow]'")):
        python(alone, "import sluiceway.client.arrow")
    for command in (("serve",), ("doctor",), ("key", "create", "x", "--scope", "admin", "--data", ".")):
        done = subprocess.run([alone / "sluiceway", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 2, done.stderr
        assert "pip install sluiceway" in done.stderr
        assert "Traceback" not in done.stderr
    with testing.server() as server:
        named: list[str | Path] = [alone / "sluiceway", "--url", server.url, "top", "--once"]
        done = subprocess.run(named, capture_output=True, text=True, check=False)
    assert (done.returncode, "pip install 'sluiceway-client[cli]'" in done.stderr) == (2, True), done.stderr
    help_text = ran(alone / "sluiceway", "--help").stdout
    assert " produce " in help_text
    assert " serve " not in help_text


def test_the_client_alone_is_small(alone: Path) -> None:
    packages = next((alone.parent / "lib").glob("python3.*/site-packages"))
    mib = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file()) / 2**20
    assert mib <= 15


def test_the_server_serves_from_its_wheels(
    repository: Path, wheels: dict[str, Path], alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment of its own, with the client of another."""
    monkeypatch.delenv("SLUICEWAY_SERVER__NEW_QUEUES")
    programs = installed(repository, [wheels["sluiceway-client"], wheels["sluiceway"]], tmp_path)
    command: list[str | Path] = [programs / "sluiceway", "dev", "--port", "0", "--no-demo", "--no-open", "--data", tmp_path / "data"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        ran(alone / "sluiceway", "--url", url, "queue", "create", "emails")
        ran(alone / "sluiceway", "--url", url, "produce", "emails", "ada@example.com")
        assert json.loads(ran(alone / "sluiceway", "--url", url, "--json", "lease", "emails").stdout)["utf8"] == "ada@example.com"
        with urlopen(f"{url}/ui/queues/emails/dead") as page:
            assert b"emails-dead" in page.read()
    finally:
        server.terminate()
        server.communicate()
    assert server.returncode == 0
