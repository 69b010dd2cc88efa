"""Sets and checks the version. CHANGELOG.md is its source.

python tools/release.py 0.2.0         the release commit: dates the section Unreleased, and sets the version wherever it is written
python tools/release.py 0.3.0.dev0    the commit after it: begins the next version
python tools/release.py --check       the changelog and each written version agree; --tag v0.2.0: and this tag is theirs
python tools/release.py --notes       prints the changes of the newest release
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNRELEASED = "## Unreleased"
IMAGE = re.compile(r"\bsluiceway:(?P<version>[0-9][\w.]*\w)")
WRITTEN = {
    "src/sluiceway/__init__.py": re.compile(r'^__version__ = "(?P<version>[^"]+)"$', re.MULTILINE),
    "pyproject.toml": re.compile(r'^    "sluiceway-client==(?P<version>[^"]+)",$', re.MULTILINE),
    "docs/reference/openapi.json": re.compile(r'^  "version": "(?P<version>[^"]+)",?$', re.MULTILINE),
    "deploy/helm/sluiceway/Chart.yaml": re.compile(r"^(?:version|appVersion): (?P<version>.+)$", re.MULTILINE),
    "deploy/container/compose.yaml": IMAGE,
    "docs/guides/containers.md": IMAGE,
}
"""Where the version is written, by file. Each has it at least once."""
_HEADING = re.compile(r"^## (?P<version>[0-9.]+) \((?P<date>[0-9]{4}-[0-9]{2}-[0-9]{2})\)$", re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
_REPOSITORY = re.compile(r'^REPOSITORY = "([^"]+)"$', re.MULTILINE)
_VERSION = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)(?P<dev>\.dev0)?")


class ReleaseError(Exception):
    """Why the version cannot be set."""


def number(version: str) -> tuple[int, ...]:
    """`0.2.0` and `0.2.0.dev0` as (0, 2, 0). Raises `ReleaseError`."""
    found = _VERSION.fullmatch(version)
    if found is None:
        raise ReleaseError(f"{version!r} is neither a version such as 0.2.0 nor one under way such as 0.3.0.dev0")
    return tuple(map(int, found.groups()[:3]))


def is_release(version: str) -> bool:
    return not version.endswith(".dev0")


def written(root: Path = ROOT) -> dict[str, str]:
    """The version in each file that has it. Raises `ReleaseError`."""
    found = {}
    for name, pattern in WRITTEN.items():
        versions = {_of_python(each) for each in pattern.findall((root / name).read_text())}
        if len(versions) != 1:
            raise ReleaseError(f"{name} has the versions {sorted(versions)}, expected one")
        found[name] = versions.pop()
    return found


def _of_python(version: str) -> str:
    return version.replace("-dev0", ".dev0")


def _of_semver(version: str) -> str:
    """As Helm wants the version of a chart: 0.3.0-dev0."""
    return version.replace(".dev0", "-dev0")


def sections(changelog: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of Unreleased, and (version, text) of each release, newest first. Raises `ReleaseError`."""
    first, *others = re.split(r"^(?=## )", changelog, flags=re.MULTILINE)[1:]
    if first.split("\n")[0] != UNRELEASED:
        raise ReleaseError(f"the first section of CHANGELOG.md is not {UNRELEASED!r}")
    releases = []
    for each in others:
        heading, _, text = each.partition("\n")
        found = _HEADING.fullmatch(heading)
        if found is None:
            raise ReleaseError(f"CHANGELOG.md: {heading!r} is not a heading such as '## 0.2.0 (2027-01-31)'")
        releases.append((found["version"], text.strip()))
    return first.partition("\n")[2].strip(), releases


def check(root: Path = ROOT, tag: str | None = None) -> str:
    """The version. Raises `ReleaseError` unless all that is written of it agrees.

    A release is the newest in the changelog, and nothing is unreleased. A version under way is higher than the newest release.
    """
    versions = written(root)
    version = versions["src/sluiceway/__init__.py"]
    if wrong := {name: each for name, each in versions.items() if each != version}:
        raise ReleaseError(f"the version is {version}, but in {wrong}")
    unreleased, releases = sections((root / "CHANGELOG.md").read_text())
    numbers = [number(each) for each, _ in releases]
    if numbers != sorted(set(numbers), reverse=True):
        raise ReleaseError("the releases in CHANGELOG.md are not in order, newest first")
    if is_release(version) and (not numbers or numbers[0] != number(version) or unreleased):
        raise ReleaseError(f"{version} is a release: it must be the newest in CHANGELOG.md, with nothing in {UNRELEASED!r}")
    if not is_release(version) and numbers and number(version) <= numbers[0]:
        raise ReleaseError(f"{version} is not higher than the newest release in CHANGELOG.md")
    if tag is not None and (tag != f"v{version}" or not is_release(version)):
        raise ReleaseError(f"the tag {tag} is not that of a release of version {version}")
    return version


def prepare(version: str, on: date, root: Path = ROOT) -> None:
    """Set the version, and for a release date its changes. Changes nothing if it raises `ReleaseError`."""
    check(root)
    path = root / "CHANGELOG.md"
    changelog = path.read_text()
    unreleased, releases = sections(changelog)
    if releases and number(version) <= number(releases[0][0]):
        raise ReleaseError(f"{version} is not higher than the newest release, {releases[0][0]}")
    if is_release(version):
        if not unreleased:
            raise ReleaseError(f"{UNRELEASED!r} of CHANGELOG.md is empty")
        path.write_text(changelog.replace(f"{UNRELEASED}\n", f"{UNRELEASED}\n\n## {version} ({on:%Y-%m-%d})\n", 1))
    for name, pattern in WRITTEN.items():
        text = (root / name).read_text()
        for found in reversed([*pattern.finditer(text)]):
            start, end = found.span("version")
            text = text[:start] + (_of_semver(version) if found[0].startswith("version: ") else version) + text[end:]
        (root / name).write_text(text)
    check(root)


def notes(root: Path = ROOT) -> str:
    """The changes of the newest release, with links that work outside the repository."""
    version, text = sections((root / "CHANGELOG.md").read_text())[1][0]
    found = _REPOSITORY.search((root / "src/sluiceway/__init__.py").read_text())
    assert found is not None
    return _LINK.sub(rf"]({found[1]}/blob/v{version}/\1)", text)


def main() -> None:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", nargs="?", help="set this version")
    parser.add_argument("--check", action="store_true", help="only check")
    parser.add_argument("--tag", help="with --check: the tag that is released")
    parser.add_argument("--notes", action="store_true", help="print the changes of the newest release")
    given = parser.parse_args()
    try:
        if given.notes:
            print(notes())
        elif given.check:
            print(check(tag=given.tag))
        elif given.version:
            prepare(given.version, datetime.now(UTC).date())
            subprocess.run(["git", "-C", str(ROOT), "diff", "--stat"], check=True)
        else:
            parser.error("name a version, or pass --check or --notes")
    except ReleaseError as error:
        sys.exit(f"release: {error}")


if __name__ == "__main__":
    main()
