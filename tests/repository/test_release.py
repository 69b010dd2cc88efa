"""The version and the changelog agree, and `tools/release.py` keeps it so."""

from __future__ import annotations

import sys
from datetime import date
from pathlib import Path

import pytest

import sluiceway

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import release

ON = date(2027, 1, 31)


@pytest.fixture
def copy(repository: Path, tmp_path: Path) -> Path:
    """The files that have the version, as of between 0.1.0 and 0.2.0."""
    for name, pattern in release.WRITTEN.items():
        text = (repository / name).read_text()
        for found in reversed([*pattern.finditer(text)]):
            start, end = found.span("version")
            text = text[:start] + "0.2.0.dev0" + text[end:]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n* One.\n\n## 0.1.0 (2026-11-23)\n\n* Zero.\n")
    return tmp_path


def test_the_version_is_that_of_the_changelog(repository: Path) -> None:
    assert release.check(repository) == sluiceway.__version__


def test_a_release_dates_what_is_unreleased_and_the_next_version_begins(copy: Path) -> None:
    release.prepare("0.2.0", ON, copy)
    assert release.check(copy, "v0.2.0") == "0.2.0"
    text = (copy / "CHANGELOG.md").read_text()
    assert text == "# Changelog\n\n## Unreleased\n\n## 0.2.0 (2027-01-31)\n\n* One.\n\n## 0.1.0 (2026-11-23)\n\n* Zero.\n"
    assert release.sections(text) == ("", [("0.2.0", "* One."), ("0.1.0", "* Zero.")])
    release.prepare("0.3.0.dev0", ON, copy)
    assert set(release.written(copy).values()) == {"0.3.0.dev0"}
    chart = (copy / "deploy/helm/sluiceway/Chart.yaml").read_text()
    assert "\nversion: 0.3.0-dev0\nappVersion: 0.3.0.dev0\n" in chart, "Helm wants SemVer"
    assert (copy / "CHANGELOG.md").read_text() == text


@pytest.mark.parametrize("version", ["0.1.0", "0.1.0.dev0", "0.0.9", "1", "v0.2.0", "0.2.0rc1", "00.2.0"])
def test_a_version_that_is_none_or_is_not_higher_is_refused(copy: Path, version: str) -> None:
    before = {path: path.read_text() for path in copy.rglob("*") if path.is_file()}
    with pytest.raises(release.ReleaseError):
        release.prepare(version, ON, copy)
    assert {path: path.read_text() for path in before} == before


def test_a_release_without_changes_is_refused(copy: Path) -> None:
    release.prepare("0.2.0", ON, copy)
    with pytest.raises(release.ReleaseError, match="is empty"):
        release.prepare("0.2.1", ON, copy)


@pytest.mark.parametrize("tag", ["v0.1.0", "v0.2.0", "v0.2.0.dev0"])
def test_a_version_under_way_has_no_tag(copy: Path, tag: str) -> None:
    with pytest.raises(release.ReleaseError, match="is not that of a release"):
        release.check(copy, tag)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("pyproject.toml", "sluiceway-client==0.2.0.dev0", "sluiceway-client==0.2.1"),
        ("pyproject.toml", "sluiceway-client==0.2.0.dev0", "sluiceway-client>=0.2"),
        ("docs/reference/openapi.json", "0.2.0.dev0", "0.1.0"),
        ("docs/guides/containers.md", "sluiceway:0.2.0.dev0", "sluiceway:0.1.0"),
        ("deploy/helm/sluiceway/Chart.yaml", "appVersion: 0.2.0.dev0", "appVersion: 0.1.0"),
        ("CHANGELOG.md", "## Unreleased\n\n* One.\n\n", ""),
        ("CHANGELOG.md", "0.1.0 (2026-11-23)", "0.2.0 (2026-11-23)"),
        ("CHANGELOG.md", "0.1.0 (2026-11-23)", "0.1.0"),
    ],
)
def test_what_disagrees_is_found(copy: Path, name: str, before: str, after: str) -> None:
    release.check(copy)
    text = (copy / name).read_text()
    assert before in text
    (copy / name).write_text(text.replace(before, after, 1))
    with pytest.raises(release.ReleaseError):
        release.check(copy)


def test_a_release_has_nothing_unreleased(copy: Path) -> None:
    release.prepare("0.2.0", ON, copy)
    path = copy / "CHANGELOG.md"
    path.write_text(path.read_text().replace("## Unreleased\n", "## Unreleased\n\n* Too late.\n"))
    with pytest.raises(release.ReleaseError, match="with nothing in"):
        release.check(copy)


def test_the_notes_of_a_release_have_links_that_work_elsewhere(copy: Path) -> None:
    path = copy / "CHANGELOG.md"
    path.write_text(path.read_text().replace("* Zero.", "* [A](docs/a.md#b), [c](https://example.org/c)."))
    there = f"{sluiceway.REPOSITORY}/blob/v0.1.0"
    assert release.notes(copy) == f"* [A]({there}/docs/a.md#b), [c](https://example.org/c)."
