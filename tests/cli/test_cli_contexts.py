"""Which server a command talks to and as whom, and the file of contexts."""

from __future__ import annotations

import itertools
import json
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluiceway.cli.common import DEFAULT_URL
from sluiceway.cli.contexts import Context, Contexts, contexts_file, read_contexts, write_contexts
from sluiceway.cli.session import Flags, Target, choose
from sluiceway.kernel.errors import SluicewayError
from tests.cli.cli_shell import Shell
from tests.server.fake_service import FakeService, serving
from tests.server.server_process import closed_port

SECRET = "slw_k7f3q2ma_not-to-be-seen"
KNOWN = Contexts({"one": Context("https://one", "env:KEY_OF_ONE", "/ca/one"), "two": Context("http://two")}, "two")
KEYS = {"KEY_OF_ONE": "key of one"}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> Shell:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Shell("q", monkeypatch, capsysbinary)


def chosen(flags: Flags, contexts: Contexts = KNOWN, environment: Mapping[str, str] = KEYS) -> Target:
    return choose(flags, {**KEYS, **environment}, lambda: contexts)


# -- which server -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        (Flags(), {}, ("http://two", None, None)),
        (Flags(), {"SLUICEWAY_API_KEY": "k"}, ("http://two", "k", None)),
        (Flags(), {"SLUICEWAY_CONTEXT": "one"}, ("https://one", "key of one", "/ca/one")),
        (Flags(), {"SLUICEWAY_CONTEXT": "one", "SLUICEWAY_API_KEY": "k"}, ("https://one", "k", "/ca/one")),
        (Flags(), {"SLUICEWAY_URL": "http://e"}, ("http://e", None, None)),
        (Flags(), {"SLUICEWAY_URL": "http://e", "SLUICEWAY_API_KEY": "k", "SLUICEWAY_CA_FILE": "/c"}, ("http://e", "k", "/c")),
        (Flags(context="one"), {"SLUICEWAY_URL": "http://e", "SLUICEWAY_API_KEY": "k"}, ("https://one", "key of one", "/ca/one")),
        (Flags(context="two"), {"SLUICEWAY_CONTEXT": "one", "SLUICEWAY_API_KEY": "k"}, ("http://two", "k", None)),
        (Flags(url="http://f"), {"SLUICEWAY_CONTEXT": "one"}, ("http://f", None, None)),
        (Flags(url="http://f", ca_file="/f"), {"SLUICEWAY_URL": "http://e", "SLUICEWAY_CA_FILE": "/c"}, ("http://f", None, "/f")),
        (Flags(context="one", ca_file="/f"), {}, ("https://one", "key of one", "/f")),
    ],
)
def test_flag_then_environment_then_context(flags: Flags, environment: Mapping[str, str], expected: tuple[str, str | None, str]) -> None:
    target = chosen(flags, environment=environment)
    assert (target.url, target.api_key, target.ca_file) == expected


def test_without_anything_it_is_the_default() -> None:
    target = chosen(Flags(), Contexts())
    assert (target.url, target.api_key) == (DEFAULT_URL, None)


def test_a_key_of_a_context_never_goes_to_another_url() -> None:
    texts = (None, "http://x")
    for url, environment_url, name in itertools.product(texts, texts, (None, "one")):
        if url is None and environment_url is None:
            continue
        environment = {"SLUICEWAY_URL": environment_url} if environment_url else {}
        if name and not environment_url:
            environment["SLUICEWAY_CONTEXT"] = name
        target = choose(Flags(url), KEYS | environment, lambda: Contexts(KNOWN.named, "one"))
        assert (target.url, target.api_key) == ("http://x", None)


def test_two_that_exclude_each_other() -> None:
    with pytest.raises(click.UsageError, match="exclude each other"):
        chosen(Flags(url="http://f", context="one"))
    with pytest.raises(SluicewayError, match="unset one of them"):
        chosen(Flags(), environment={"SLUICEWAY_URL": "http://e", "SLUICEWAY_CONTEXT": "one"})


def test_a_key_that_cannot_be_read_says_which_and_no_more(tmp_path: Path) -> None:
    file = tmp_path / "key"
    contexts = Contexts({"env": Context("http://x", "env:UNSET"), "file": Context("http://x", f"file:{file}")})
    with pytest.raises(SluicewayError, match="variable 'UNSET' is not set"):
        chosen(Flags(context="env"), contexts)
    with pytest.raises(SluicewayError, match="No such file"):
        chosen(Flags(context="file"), contexts)
    file.write_text(f"{SECRET}\n")
    assert chosen(Flags(context="file"), contexts).api_key == SECRET
    file.write_bytes(SECRET.encode() + b"\xff")
    with pytest.raises(SluicewayError) as refused:
        chosen(Flags(context="file"), contexts)
    assert SECRET not in str(refused.value)


def test_no_repr_shows_a_key() -> None:
    assert SECRET not in repr(Target("http://x", SECRET))
    assert SECRET not in repr(Contexts({"a": Context("http://x", SECRET)}))


# -- the file ---------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,9}", fullmatch=True), st.tuples(TEXTS, st.none() | TEXTS, st.none() | TEXTS)
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, named: dict[str, tuple[str, str | None, str | None]]) -> None:
    path = tmp_path_factory.mktemp("contexts") / "new" / "contexts.toml"
    contexts = Contexts({name: Context(*values) for name, values in named.items()}, next(iter(named), None))
    write_contexts(path, contexts)
    assert read_contexts(path) == contexts
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("url = ", "is not TOML"),
        ("other = 1", "nothing else"),
        ("contexts = 1", "nothing else"),
        ("[contexts]\none = 1", "contexts.one"),
        ("[contexts.one]\nurl = 'http://x'\napikey = 'x'", "contexts.one"),
        ("[contexts.one]\nurl = 1", "contexts.one"),
        ("[contexts.one]\nca_file = 'x'", "url is missing"),
        ("current = 'gone'", "sluiceway context use NAME"),
    ],
)
def test_a_broken_file_says_what_is_wrong_in_it(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "contexts.toml"
    path.write_text(text)
    with pytest.raises(SluicewayError) as refused:
        read_contexts(path)
    assert said in refused.value.detail
    assert str(path) in refused.value.detail


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "contexts.toml"
    write_contexts(path, Contexts({"a": Context("http://x", SECRET)}))
    path.chmod(0o644)
    with pytest.raises(SluicewayError) as refused:
        read_contexts(path)
    assert f"chmod 600 {path}" in refused.value.detail
    assert SECRET not in refused.value.detail
    write_contexts(path, Contexts({"a": Context("http://x", "env:KEY")}))
    path.chmod(0o644)
    assert read_contexts(path).named["a"].api_key == "env:KEY"


def test_where_the_file_is() -> None:
    assert contexts_file({"XDG_CONFIG_HOME": "/x"}) == Path("/x/sluiceway/contexts.toml")
    default = Path.home() / ".config/sluiceway/contexts.toml"
    assert contexts_file({}) == contexts_file({"XDG_CONFIG_HOME": ""}) == contexts_file({"XDG_CONFIG_HOME": "relative"}) == default


# -- the commands -----------------------------------------------------------------------------------------------------


def test_contexts_from_beginning_to_end(shell: Shell) -> None:
    assert shell.ends("context", "list") == (0, "", "No contexts. Add one: sluiceway context add NAME --url URL\n")
    assert shell.says("context", "add", "local", "--url", "http://127.0.0.1:1/") == "Added local, now the current context\n"
    assert shell.says("context", "add", "prod", "--url", "https://queue.example", "--api-key-env", "PROD_KEY") == "Added prod\n"
    first, second = shell.json("context", "list")
    assert first == {"name": "local", "url": "http://127.0.0.1:1", "api_key": "none", "ca_file": None, "current": True}
    assert (second["name"], second["api_key"], second["current"]) == ("prod", "env:PROD_KEY", False)
    assert shell.says("context", "use", "prod") == "Using prod: https://queue.example\n"
    assert shell.json("context", "show")[0]["name"] == "prod"
    assert "https://queue.example" in shell.says("context", "show")
    assert shell.json("context", "show", "local")[0]["current"] is False
    assert shell.says("context", "remove", "prod") == "Removed prod\n"
    code, _, err = shell.ends("context", "show")
    assert code == 3
    assert "sluiceway context use NAME" in err
    code, _, err = shell.ends("context", "use", "prod", "--json")
    assert code == 3
    assert json.loads(err)["detail"] == "context: there is no context 'prod'; known contexts: local"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_key_that_is_typed_is_kept_and_never_shown(shell: Shell, monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    monkeypatch.setattr(click, "prompt", lambda *_, hide_input, **__: SECRET if hide_input and terminal else None)
    add = ("context", "add", "prod", "--url", "https://queue.example", "--api-key")
    code, out, err = shell.ends(*add, stdin=f"{SECRET}\n".encode(), terminal=terminal)
    assert code == 0, err
    path = contexts_file()
    assert tomllib.loads(path.read_text())["contexts"]["prod"]["api_key"] == SECRET
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = [shell.says("context", verb, *more) for verb in ("list", "show") for more in ((), ("--json",))]
    assert all("stored here" in text for text in shown)
    assert SECRET not in "".join([out, err, *shown])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "a b", "--url", "http://x"), "'a b' is not"),
        (("add", "a", "--url", "x"), "'x' is not a URL"),
        (("add", "a", "--url", "http://x", "--api-key", "--api-key-env", "K"), "exclude each other"),
        (("add", "a", "--url", "http://x", "--api-key"), "not an API key"),
        (("add", "a", "--url", "http://x", "--ca-file", "/not/there"), "does not exist"),
    ],
)
def test_wrong_usage_is_2(shell: Shell, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = shell.ends("context", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not contexts_file().exists()


def test_commands_follow_the_context(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeService()) as url:
        shell.says("context", "add", "fake", "--url", url)
        assert [each["queue_name"] for each in shell.json("queue", "list")] == ["q"]
        with closed_port() as port:
            shell.says("context", "add", "gone", "--url", f"http://127.0.0.1:{port}")
            assert shell.ends("queue", "list", "--context", "gone")[0] == 4
            monkeypatch.setenv("SLUICEWAY_CONTEXT", "gone")
            assert shell.ends("queue", "list")[0] == 4
            assert shell.ends("queue", "list", "--context", "fake")[0] == 0
