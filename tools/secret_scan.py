"""Look for secrets in the files of the repository, and in all that its history has: `python tools/secret_scan.py [--history]`.

What is found is shown by its first characters only. What is known to be none is in `secret_scan.txt`, by its hash, with the reason.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

REPOSITORY: Final = Path(__file__).resolve().parents[1]
KNOWN: Final = Path(__file__).with_name("secret_scan.txt")
_SHOWN: Final = 6


class Rule(NamedTuple):
    """A kind of secret: `pattern`, whose first group, or all of it, is the secret. `also`: what else must hold of that."""

    name: str
    pattern: re.Pattern[bytes]
    also: Callable[[bytes], bool] = lambda secret: True


class Finding(NamedTuple):
    """`place`: a file with a line, or a file in the history."""

    place: str
    rule: str
    secret: bytes

    @property
    def digest(self) -> str:
        return digest_of(self.secret)

    def __str__(self) -> str:
        return f"{self.place}: {self.rule}: {self.secret[:_SHOWN].decode('ascii', 'replace')}… ({len(self.secret)} bytes), {self.digest}"


def digest_of(secret: bytes) -> str:
    """The name by which KNOWN has a text."""
    return hashlib.sha256(secret).hexdigest()[:16]


def entropy(text: bytes) -> float:
    """Bits for each character, by how often each occurs."""
    return -sum(count / len(text) * math.log2(count / len(text)) for count in Counter(text).values())


def _is_random(secret: bytes) -> bool:
    """Whether it looks drawn by chance: words and names have fewer bits, and seldom digits between their letters."""
    return entropy(secret) >= 3.5 and len(re.findall(rb"[0-9]+", secret)) >= 3 and re.search(rb"[A-Za-z]", secret) is not None


def _is_no_word(secret: bytes) -> bool:
    """Of a password, which people choose: neither a placeholder, nor one of the words that stand for one in tests and documents."""
    return not re.fullmatch(
        rb"[A-Z_]+|(?:the-)?(?:pass|pw|secret|password|passwort|hunter2|geheim|sluiceway|postgres|tests?|admin)\w*", secret
    )


RULES: Final = (
    Rule("a private key", re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s+([A-Za-z0-9+/=]{40,})")),
    Rule("an API key of Sluiceway", re.compile(rb"\bslw_[a-z0-9]{8}_[A-Za-z0-9_-]{20,}"), _is_random),
    Rule("a cluster's secret", re.compile(rb"\bslwc_[A-Za-z0-9_-]{20,}"), _is_random),
    Rule("a key of AWS", re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")),
    Rule("a token of GitHub", re.compile(rb"\bgh[pousr]_[A-Za-z0-9]{36,}|\bgithub_pat_[A-Za-z0-9_]{40,}")),
    Rule("a token of GitLab", re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}")),
    Rule("a token of Slack", re.compile(rb"\bxox[abeprs]-[A-Za-z0-9-]{10,}")),
    Rule("a key of Google", re.compile(rb"\bAIza[0-9A-Za-z_-]{35}")),
    Rule("a key of Stripe", re.compile(rb"\b[rs]k_live_[0-9A-Za-z]{16,}")),
    Rule("a token of an index of packages", re.compile(rb"\bpypi-AgE[A-Za-z0-9_-]{40,}|\bnpm_[A-Za-z0-9]{36}\b")),
    Rule("a key of a model's API", re.compile(rb"\bsk-[A-Za-z0-9_-]{32,}"), _is_random),
    Rule("a JSON Web Token", re.compile(rb"\beyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}")),
    Rule("a key of an Azure account", re.compile(rb"AccountKey=([A-Za-z0-9+/]{80,}={0,2})")),
    Rule("a signature of Azure", re.compile(rb"[?&]sig=([A-Za-z0-9%+/]{40,})")),
    Rule("a password in a URL", re.compile(rb"[a-z]://[^\s/:@'\"`{}<>$\\]+:([^\s/:@'\"`{}<>$\\]{6,})@"), _is_no_word),
    Rule(
        "a value of a secret's name",
        re.compile(
            rb"(?i)(?:secret|token|passwo?r?d|passphrase|api_?key|access_?key|credential)[a-z_]*[\"']?\]?\s{0,3}[:=]\s{0,3}b?[\"']"
            rb"([A-Za-z0-9+/_=.\-]{20,})[\"']"
        ),
        _is_random,
    ),
)


def secrets_in(data: bytes, place: str, with_lines: bool = True) -> Iterator[Finding]:
    """What looks like a secret in those bytes. Files that are no text have none."""
    if b"\0" in data[:8_192]:
        return
    for rule in RULES:
        for found in rule.pattern.finditer(data):
            secret = found[found.lastindex or 0]
            if rule.also(secret):
                line = data.count(b"\n", 0, found.start()) + 1
                yield Finding(f"{place}:{line}" if with_lines else place, rule.name, secret)


def in_tree(repository: Path) -> Iterator[Finding]:
    """In the files that the repository has, as they are now."""
    for name in _git(repository, "ls-files", "-z").split(b"\0"):
        path = repository / name.decode()
        if name and path.is_file() and not path.is_symlink():
            yield from secrets_in(path.read_bytes(), name.decode())


def in_history(repository: Path) -> Iterator[Finding]:
    """In every file that any commit ever had, and in the commits' messages."""
    yield from secrets_in(_git(repository, "log", "--all", "--format=%H %an %ae%n%B"), "a commit's message", with_lines=False)
    named = [line.partition(b" ") for line in _git(repository, "rev-list", "--objects", "--all").splitlines()]
    names = {object: name.decode(errors="replace") for object, _, name in named if name}
    # In a file, since whoever writes to one pipe of a program, and then reads from the other, may wait for ever.
    with tempfile.TemporaryFile() as wanted:
        wanted.write(b"\n".join(names))
        wanted.seek(0)
        with subprocess.Popen(["git", "cat-file", "--batch"], cwd=repository, stdin=wanted, stdout=subprocess.PIPE) as reading:
            assert reading.stdout is not None
            while head := reading.stdout.readline():
                object, kind, size = head.split()
                data = reading.stdout.read(int(size) + 1)
                if kind == b"blob":
                    yield from secrets_in(data, f"{names[object]} ({object[:12].decode()} in the history)")


def _git(repository: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=repository, stdout=subprocess.PIPE, check=True).stdout


def known(path: Path = KNOWN) -> dict[str, str]:
    """The reasons why texts are no secrets, by their digests."""
    lines = [line.partition(" ") for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {digest: reason.strip() for digest, _, reason in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", action="store_true", help="also look at all that the history has")
    given = parser.parse_args()
    allowed = known()
    places = [("the files", in_tree(REPOSITORY))]
    if given.history:
        places.append(("the history", in_history(REPOSITORY)))
    bad = 0
    for what, findings in places:
        found = list(findings)
        new = {each.digest: each for each in found if each.digest not in allowed}
        for each in new.values():
            print(each)
        others = len({each.digest for each in found} - new.keys())
        print(f"{what}: {len(new)} secrets; {others} texts that look like one and are known to be none")
        bad += len(new)
    if bad:
        print(f"Revoke what is a secret. What is none gets a line in {KNOWN.name}: its digest, and the reason.", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
