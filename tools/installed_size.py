"""Measures what an installation takes: `python tools/installed_size.py`, with `--write` into docs/project/dependencies.md.

Each distribution is installed from the lock file into a new environment, without extras. The size of a package is that of the files in its
RECORD. The bytecode that pip compiles from them is counted apart.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools/bin/uv"
PAGE = ROOT / "docs/project/dependencies.md"
LIMITS = {"sluiceway": 300, "sluiceway-client": 15}
"""Megabytes (10**6 bytes) that an installation may take, by distribution."""
SMALL = 500_000
"""Bytes below which a package has no row of its own."""
_PLACE = re.compile(r"(<!-- sizes: .* -->\n).*?(<!-- end of sizes -->)", re.DOTALL)


@dataclass(frozen=True)
class Installation:
    """Bytes by package, largest first, and of the bytecode of all."""

    packages: dict[str, int]
    bytecode: int

    @property
    def total(self) -> int:
        return sum(self.packages.values())


def measure(distribution: str, folder: Path) -> Installation:
    """Install the distribution into a new environment in `folder`."""
    needs, place = folder / "needs.txt", folder / "environment"
    run(UV, "export", "--locked", "--package", distribution, "--no-dev", "--no-emit-workspace", "--quiet", "--output-file", needs)
    run(UV, "build", "--quiet", "--all-packages", "--wheel", "--out-dir", folder)
    wheels = folder.glob("*.whl") if distribution == "sluiceway" else folder.glob("sluiceway_client-*.whl")
    run(UV, "venv", "--quiet", "--python", sys.executable, place)
    install = (UV, "pip", "install", "--quiet", "--python", place / "bin/python", "--link-mode", "copy", "--compile-bytecode")
    run(*install, "--requirement", needs)
    run(*install, "--no-deps", *wheels)
    packages = next((place / "lib").glob("python3.*/site-packages"))
    sizes: dict[str, int] = {}
    for information in packages.glob("*.dist-info"):
        with (information / "RECORD").open(newline="") as record:
            files = [packages / name for name, *_ in csv.reader(record) if not name.endswith(".pyc")]
        sizes[information.name.partition("-")[0]] = sum(path.stat().st_size for path in files if path.is_file())
    bytecode = sum(path.stat().st_size for path in packages.rglob("*.pyc"))
    return Installation(dict(sorted(sizes.items(), key=lambda each: -each[1])), bytecode)


def run(*command: object) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"UV_SYSTEM_CERTS": os.environ.get("UV_SYSTEM_CERTS", "1"), "UV_PYTHON_DOWNLOADS": "never"}
    subprocess.run([str(each) for each in command], check=True, cwd=ROOT, env=environment)


def table(found: dict[str, Installation]) -> str:
    """Both installations in Markdown, in MB: a row for each package of at least `SMALL`, and one for the others."""
    server, client = found["sluiceway"], found["sluiceway-client"]
    large = [name for name, size in server.packages.items() if size >= SMALL]
    rows = [f"| `{name.replace('_', '-')}` | {_share(server, [name])} | {_share(client, [name])} |" for name in large]
    others = [name for name in server.packages if name not in large]
    totals = (f"**{each.total / 1e6:.1f}** (limit {LIMITS[name]})" for name, each in (("sluiceway", server), ("sluiceway-client", client)))
    system = f"{platform.system()} {platform.machine()}, CPython {platform.python_version()}"
    return "\n".join(
        (
            f"Measured on {datetime.now(UTC):%Y-%m-%d} on {system}, in MB (10⁶ bytes):",
            "",
            "| package | in `sluiceway` | in `sluiceway-client` |",
            "| --- | ---: | ---: |",
            *rows,
            f"| {len(others)} others | {_share(server, others)} | {_share(client, others)} |",
            f"| **all** | {' | '.join(totals)} |",
            f"| with bytecode | {' | '.join(f'{(each.total + each.bytecode) / 1e6:.1f}' for each in (server, client))} |",
            "",
        )
    )


def _share(installation: Installation, names: Sequence[str]) -> str:
    size = sum(installation.packages.get(name, 0) for name in names)
    return f"{size / 1e6:.1f} ({size / installation.total:.0%})" if size else ""


def main() -> None:
    """Measure and print, or write. The exit code is 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/project/dependencies.md")
    given = parser.parse_args()
    found = {}
    for distribution in LIMITS:
        with tempfile.TemporaryDirectory(prefix="sluiceway-size-") as folder:
            found[distribution] = measure(distribution, Path(folder))
    text = table(found)
    if given.write:
        page, count = _PLACE.subn(lambda place: place[1] + text + place[2], PAGE.read_text())
        assert count == 1, f"{PAGE} has no place for the sizes"
        PAGE.write_text(page)
    else:
        print(text)
    if large := [name for name, each in found.items() if each.total > LIMITS[name] * 1e6]:
        sys.exit(f"larger than allowed: {', '.join(large)}")


if __name__ == "__main__":
    main()
