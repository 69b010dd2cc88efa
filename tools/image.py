"""Builds the container image.

python tools/image.py context     the wheels that go into it, in build/image/context
python tools/image.py build       the same, and the image, with the container engine at hand

Everything in the image but its base comes from the lock file and this checkout. `--base packages` makes the base, too, of Debian's
packages, for machines that reach no container registry: it needs root and mmdebstrap.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import Marker

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build/image"
CONTEXT = BUILD / "context"
PYTHON = "3.13"
"""Python of the base image."""
BASE = "docker.io/library/python:3.13-slim"
SUITE = "trixie"
"""The Debian release whose `python3` is `PYTHON`."""
EXTRAS = ("postgres", "otel")
TAG = "localhost/sluiceway:latest"
MAX_PROCESSES = 4096
"""Engines raise the limits of a container to the kernel's. Without the capability for it, in a sandbox, they may only lower them."""


@dataclass(frozen=True)
class Engine:
    """A container engine. `own`: its images are kept in build/image, apart from the user's."""

    program: str
    own: bool = False

    @property
    def command(self) -> list[str]:
        if not self.own:
            return [self.program]
        # vfs works everywhere, and copies the whole image for each step. runc: crun refuses machines with both versions of cgroups.
        driver = "overlay" if "\toverlay\n" in Path("/proc/filesystems").read_text() else "vfs"
        storage = ["--storage-driver", driver, "--root", str(BUILD / "storage"), "--runroot", str(BUILD / "run")]
        runtime = shutil.which("runc", path=f"{os.environ['PATH']}:/usr/sbin")
        return [self.program, *storage, *(["--runtime", runtime] if runtime else [])]

    def build(self, base: str, tag: str) -> None:
        # `docker` format: OCI images have no healthcheck.
        isolation = ["--isolation", "chroot", "--format", "docker"] if self.program == "podman" else []
        file = ROOT / "deploy/container/Containerfile"
        ran(*self.command, "build", *isolation, "--build-arg", f"BASE={base}", "--tag", tag, "--file", file, CONTEXT)

    def limits(self) -> list[str]:
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        return ["--ulimit", f"nofile={files}:{files}", "--ulimit", f"nproc={MAX_PROCESSES}:{MAX_PROCESSES}"] if self.own else []


def ran(*command: object, cwd: Path = ROOT) -> None:
    done = subprocess.run([str(each) for each in command], cwd=cwd, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} failed")


def context() -> None:
    """Fill build/image/context."""
    shutil.rmtree(CONTEXT, ignore_errors=True)
    wheels = CONTEXT / "wheels"
    wheels.mkdir(parents=True)
    needs = CONTEXT / "requirements.txt"
    extras = [option for each in EXTRAS for option in ("--extra", each)]
    ran(ROOT / ".tools/bin/uv", "export", "--locked", *extras, "--no-dev", "--no-emit-workspace", "--quiet", "--output-file", needs)
    needs.write_text("".join(_for_the_image(needs.read_text())))
    pip = [ROOT / ".tools/bin/python", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", wheels]
    target = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", PYTHON, *_platforms()]
    ran(*pip, *target, "--require-hashes", "--requirement", needs)
    ran(*pip, "--no-deps", "pip")
    for project in (ROOT, ROOT / "client"):
        ran(ROOT / ".venv/bin/python", "-m", "hatchling", "build", "--target", "wheel", "--directory", wheels, cwd=project)
    shutil.copy(ROOT / "deploy/container/healthcheck.py", CONTEXT)


def _for_the_image(requirements: str) -> Iterator[str]:
    """Yield the lines of the requirements that the base's Python needs, without their markers: pip evaluates those for its own Python."""
    needed = False
    for line in requirements.splitlines(keepends=True):
        if line[0] not in " #":
            name, _, marker = line.rstrip("\\\n ").partition(" ; ")
            needed = not marker or Marker(marker).evaluate({"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"})
            line = f"{name} \\\n"
        if needed:
            yield line


def _platforms() -> list[str]:
    """Wheels that run with the base's glibc (2.41 in Debian 13), on the machine's own architecture."""
    names = [f"manylinux_2_{minor}_{platform.machine()}" for minor in range(40, 4, -1)]
    return [option for name in (*names, f"manylinux2014_{platform.machine()}") for option in ("--platform", name)]


def base_of_packages(engine: Engine) -> str:
    """Make a base image of Debian's packages, or take the one made before, and return its name."""
    name = f"localhost/sluiceway-base:{SUITE}"
    if subprocess.run([*engine.command, "image", "inspect", name], capture_output=True, check=False).returncode == 0:
        return name
    archive = BUILD / "base.tar"
    without = [f"--dpkgopt=path-exclude=/usr/share/{each}/*" for each in ("doc", "man", "locale", "info")]
    include = "--include=python3,ca-certificates,libstdc++6"
    ran("mmdebstrap", "--quiet", "--variant=essential", include, *without, SUITE, archive)
    ran(*engine.command, "import", archive, name)
    archive.unlink()
    return name


def version() -> str:
    found = re.search(r'__version__ = "([^"]+)"', (ROOT / "src/sluiceway/__init__.py").read_text())
    assert found is not None
    return found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["context", "build"])
    parser.add_argument("--engine", choices=["podman", "docker"], default="podman" if shutil.which("podman") else "docker")
    parser.add_argument("--base", default=BASE, help=f"base image, or `packages` [default: {BASE}]")
    parser.add_argument("--tag", default=f"sluiceway:{version()}")
    given = parser.parse_args()
    context()
    if given.what == "build":
        engine = Engine(given.engine)
        engine.build(base_of_packages(engine) if given.base == "packages" else given.base, given.tag)


if __name__ == "__main__":
    main()
