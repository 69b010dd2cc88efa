"""The workflows and the forms of the forge fit the repository. They run only there, so each of their steps is a target of the Makefile."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import sluiceway


def loaded(path: Path) -> dict[str, Any]:
    # `on` is true in YAML 1.1.
    found = {"on" if name is True else name: value for name, value in yaml.safe_load(path.read_text()).items()}
    return found


@pytest.fixture(params=["ci", "release"])
def workflow(repository: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return loaded(repository / f".github/workflows/{request.param}.yml")


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


def test_every_target_that_a_workflow_makes_is_one(repository: Path, workflow: dict[str, Any]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    made = [word for step in steps(workflow) for word in re.findall(r"\bmake ([a-z-]+)", step.get("run", ""))]
    assert made
    assert set(made) <= targets


def test_a_job_may_do_only_what_it_needs(workflow: dict[str, Any]) -> None:
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        writes = {right for right, level in job.get("permissions", {}).items() if level == "write"}
        allowed = {"attest": {"id-token", "attestations"}, "publish": {"id-token"}, "announce": {"contents"}}
        assert writes == allowed.get(name, set()), name
        # What runs code of the repository can write nothing.
        assert not (writes and any("checkout" in step.get("uses", "") for step in job["steps"])), name


def test_nothing_is_published_untested(repository: Path) -> None:
    jobs = loaded(repository / ".github/workflows/release.yml")["jobs"]
    assert set(jobs["attest"]["needs"]) == {"test", "build"}
    assert jobs["publish"]["needs"] == "attest"
    assert jobs["announce"]["needs"] == "publish"
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yml"


def test_the_tested_versions_are_those_that_are_promised(repository: Path) -> None:
    matrix = loaded(repository / ".github/workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]
    for name in ("pyproject.toml", "client/pyproject.toml"):
        classifiers = tomllib.loads((repository / name).read_text())["project"]["classifiers"]
        promised = [found[1] for each in classifiers if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", each))]
        assert matrix["python"] == [*promised, "3.14"], "3.14 is tested before it is promised"
    page = (repository / "docs/reference/versions.md").read_text()
    assert f"| Python | {', '.join(promised)}. " in page
    assert f"| PySpark | the two newest minor versions: {', '.join(matrix['pyspark'])} |" in page


def test_a_workflow_is_well_formed(repository: Path) -> None:
    program = shutil.which("actionlint")
    if program is None:
        pytest.skip("actionlint is not installed: make lint-workflows builds it")
    done = subprocess.run([program], cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_forms_have_what_the_forge_needs(repository: Path) -> None:
    folder = repository / ".github/ISSUE_TEMPLATE"
    for path in set(folder.glob("*.yml")) - {folder / "config.yml"}:
        form = loaded(path)
        assert {"name", "description", "body"} <= set(form), path.name
        ids = [each["id"] for each in form["body"] if each["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0
        assert all(each["attributes"].get("label") for each in form["body"] if each["type"] != "markdown")
    links = loaded(folder / "config.yml")["contact_links"]
    assert all(each["url"].startswith(f"{sluiceway.REPOSITORY}/") for each in links)
