"""Installs what `make dist` built into new environments, and uses it there: `python tools/smoke.py [PYTHON …]`.

The wheels are installed as a user would, with the newest dependencies that they allow, and then the source distributions. The client of one
environment talks to the server of the other. `--lowest` takes the oldest direct dependencies that the metadata allow, which must work, too.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = ROOT / ".tools/bin/uv"
START = 60.0
"""Seconds within which a server must listen. Its first start compiles its modules."""
KINDS = {"wheels": "*.whl", "source distributions": "*.tar.gz"}


def main() -> None:
    """Parse the command line, and check the distributions under each Python. The exit code is not 0 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="interpreters to check with [default: this one]")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the distributions")
    parser.add_argument("--lowest", action="store_true", help="with the oldest direct dependencies, in place of the newest")
    given = parser.parse_args()
    for python in given.pythons:
        for kind, pattern in KINDS.items():
            found = sorted(given.dist.glob(pattern))
            client = [path for path in found if path.name.startswith("sluiceway_client-")]
            if len(found) != 2 or len(client) != 1:
                sys.exit(f"smoke: expected one of each distribution in {given.dist}, found {[path.name for path in found]}")
            print(f"{kind}, {Path(python).name}, {'oldest' if given.lowest else 'newest'} dependencies", flush=True)
            with tempfile.TemporaryDirectory(prefix="sluiceway-smoke-") as folder:
                use(
                    *(
                        installed(Path(folder) / name, python, files, given.lowest)
                        for name, files in (("client", client), ("server", found))
                    )
                )


def installed(place: Path, python: str, files: Sequence[Path], lowest: bool) -> Path:
    """The programs of a new environment that has the distributions."""
    run(UV, "venv", "--quiet", "--python", python, place)
    resolution = ("--resolution", "lowest-direct") if lowest else ()
    run(UV, "pip", "install", "--quiet", "--python", place / "bin/python", *resolution, *files)
    run(UV, "pip", "check", "--quiet", "--python", place / "bin/python")
    return place / "bin"


def use(client: Path, server: Path) -> None:
    """Send items from the client's environment through a server of the other. Raises `CalledProcessError` or `AssertionError`."""
    versions = {run(place / "sluiceway", "--version") for place in (client, server)}
    assert len(versions) == 1, versions
    run(client / "python", "-I", "-c", "import sluiceway.client, sluiceway.worker")
    run(server / "python", "-I", "-c", "import sluiceway.client.arrow, sluiceway.group, sluiceway.testing")
    with tempfile.TemporaryDirectory(prefix="sluiceway-smoke-") as folder:
        told, log = Path(folder) / "url", Path(folder) / "log"
        command = [server / "sluiceway", "serve", "--data", f"{folder}/data", "--listen", "127.0.0.1:0", "--url-file", told]
        with log.open("wb") as out, subprocess.Popen([*map(str, command)], stdout=out, stderr=out, env=environment()) as process:
            try:
                url = listening(process, told)
                pass_items(client / "sluiceway", url)
                look(url)
            except BaseException:
                print(log.read_text(), file=sys.stderr)
                raise
            finally:
                process.terminate()
        assert process.returncode == 0, log.read_text()


def pass_items(program: Path, url: str) -> None:
    """Produce, lease and complete on the command line."""
    run(program, "--url", url, "queue", "create", "smoke", "--partitions", "2")
    run(program, "--url", url, "produce", "smoke", "one", "two")
    leased = run(program, "--url", url, "--json", "lease", "smoke", "-n", "10")
    ids = re.findall(r'"id":"([^"]+)"', leased)
    assert len(ids) == 2, leased
    run(program, "--url", url, "complete", "smoke", "--strict", *ids)
    assert '"completed":2' in run(program, "--url", url, "--json", "stats", "smoke")


def look(url: str) -> None:
    """Open the dashboard and everything that its page loads, which includes the files that are not in the repository."""
    page = read(f"{url}/ui").decode()
    loaded = re.findall(r'(?:src|href)="(/ui/assets/[^"]+)"', page)
    assert any("htmx" in path for path in loaded), loaded
    assert all(read(url + path) for path in loaded)
    read(f"{url}/openapi.json")


def read(url: str) -> bytes:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=30) as answer:
        return bytes(answer.read())


def listening(process: subprocess.Popen[bytes], told: Path) -> str:
    deadline = time.monotonic() + START
    while not (told.exists() and told.read_text().strip()):
        assert process.poll() is None, "the server stopped"
        assert time.monotonic() < deadline, f"the server did not listen within {START:.0f} s"
        time.sleep(0.1)
    return told.read_text().strip()


def environment() -> dict[str, str]:
    """This process's, without what would lend the environments our modules or a user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLUICEWAY_", "VIRTUAL_ENV"))}
    return kept | {"UV_SYSTEM_CERTS": os.environ.get("UV_SYSTEM_CERTS", "1"), "UV_PYTHON_DOWNLOADS": "never"}


def run(*command: object) -> str:
    """The command's output. Raises `CalledProcessError`; its errors are shown as they come."""
    words = [str(each) for each in command]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, env=environment(), cwd=tempfile.gettempdir()).stdout


if __name__ == "__main__":
    main()
