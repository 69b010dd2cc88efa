"""The repository has no secrets, and its scanner finds those that somebody puts there."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import secret_scan

RANDOM = "9fK3xQ7vLm2Zp8Rt5Wn1"
HEX = "4f1d9c27a8b35e60d2719f8c3b6a05e7d1c49f2b8e3a6075"
PLANTED = {
    "a private key": "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEpAIBAAKCAQEA" + RANDOM * 2,
    "an API key of Sluiceway": "slw_" + f"k7f3q2ma_{HEX}",
    "a cluster's secret": "slwc_" + HEX,
    "a key of AWS": "AKIA" + "IOSFODNN7EXAMPLE",
    "a token of GitHub": "ghp_" + RANDOM * 2,
    "a token of GitLab": "glpat-" + RANDOM,
    "a token of Slack": "xoxb-" + "123456789012-" + RANDOM,
    "a key of Google": "AIza" + (RANDOM * 2)[:35],
    "a key of Stripe": "sk_live_" + RANDOM,
    "a token of an index of packages": "pypi-AgE" + RANDOM * 3,
    "a key of a model's API": "sk-" + RANDOM * 2,
    "a JSON Web Token": "eyJ" + f"hbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{RANDOM}",
    "a key of an Azure account": "AccountKey=" + RANDOM * 4 + "==",
    "a signature of Azure": "https://a.blob.core.windows.net/c?sv=2022&sig=" + RANDOM * 2,
    "a password in a URL": "postgresql://app:" + f"{RANDOM[:9]}@db.internal/orders",
    "a value of a secret's name": 'secret_access_key = "' + RANDOM + '"',
}
INNOCENT = [
    "postgresql://USER:PASSWORD@HOST/DATABASE",
    "postgresql://app:$PASSWORD@db/x",
    "https://user:secret@example.com",
    'api_key = "slw_k7f3q2ma_…"',
    'secret = "only-for-tests-and-not-random"',
    "token: str = field(default_factory=new_secret_of_the_cluster)",
    "sha256 = 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
]


def found(text: str) -> list[str]:
    return [each.rule for each in secret_scan.secrets_in(f"# a\n{text}\n".encode(), "x")]


@pytest.mark.parametrize("rule", [rule.name for rule in secret_scan.RULES])
def test_a_secret_is_found(rule: str) -> None:
    assert rule in found(PLANTED[rule])


@pytest.mark.parametrize("text", INNOCENT)
def test_what_stands_for_one_is_not(text: str) -> None:
    assert found(text) == []


def test_what_is_found_is_not_shown() -> None:
    (finding,) = secret_scan.secrets_in(b"\n" + PLANTED["a cluster's secret"].encode(), "x.py")
    assert str(finding).startswith("x.py:2: a cluster's secret: slwc_4…")
    assert HEX not in str(finding)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def test_a_secret_that_was_removed_is_in_the_history(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    for number, text in enumerate((PLANTED["a cluster's secret"], "nothing")):
        (tmp_path / "a.txt").write_text(text)
        git(tmp_path, "add", "a.txt")
        git(tmp_path, "commit", "-q", "-m", f"{number} {PLANTED['a token of GitLab'] if number else ''}")
    assert list(secret_scan.in_tree(tmp_path)) == []
    assert {each.rule for each in secret_scan.in_history(tmp_path)} == {"a cluster's secret", "a token of GitLab"}


def test_the_files_have_none(repository: Path) -> None:
    if not (repository / ".git").exists():
        pytest.skip("not a checkout")
    known = secret_scan.known()
    assert [str(each) for each in secret_scan.in_tree(repository) if each.digest not in known] == []
    assert all(re.fullmatch(r"[0-9a-f]{16}", digest) and reason for digest, reason in known.items())


def test_every_locked_file_has_its_hash(repository: Path) -> None:
    """What an installation downloads is what was locked: uv and pip refuse another content."""
    packages = tomllib.loads((repository / "uv.lock").read_text())["package"]
    of_index = [each for each in packages if "registry" in each["source"]]
    files = [file for each in of_index for file in (*each.get("wheels", ()), *([each["sdist"]] if "sdist" in each else ()))]
    assert len(files) > 1_000
    assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", file["hash"]) for file in files)
    assert {each["source"]["registry"] for each in of_index} == {"https://pypi.org/simple"}
    # Those that are not from the index are the two of this repository.
    assert {each["name"] for each in packages if "registry" not in each["source"]} == {"sluiceway", "sluiceway-client"}
