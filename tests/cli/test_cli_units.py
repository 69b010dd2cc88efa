"""The command line without a server: what is typed, what is printed, how it ends."""

from __future__ import annotations

import io
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from sluiceway import __version__
from sluiceway.cli import admin, line_producer, main, session
from sluiceway.cli.common import Failure, chunks, exit_code, print_table, printable, table
from sluiceway.client import CallError, Client
from sluiceway.client.answers import Ignored, Left, MovedItems
from sluiceway.kernel.errors import KINDS, SluicewayError
from tests.cli.cli_shell import commands_of
from tests.server.server_process import PATIENCE, closed_port

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Runs the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sluiceway", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capsysbinary.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, out.decode(), err.decode()

    return run


def test_help_and_version_load_nothing_heavy() -> None:
    program = """
import sys
from sluiceway.cli.main import main
sys.argv = ["sluiceway", "--help"]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {"httpx", "msgspec", "numpy", "pyarrow", "pyspark", "rich", "uvicorn", "asyncio", "ssl", "tomllib", "apsw"} & set(sys.modules)
assert not heavy, heavy
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(f"  {command} " in done.stdout for command in commands_of(main.cli))


def test_every_command_explains_itself(run: Run) -> None:
    def walk(path: tuple[str, ...], command: click.Command) -> None:
        code, out, _ = run(*path, "--help")
        assert code == 0
        assert command.help
        assert " ".join(command.help.split()) in " ".join(out.split())
        for option in command.params:
            assert not isinstance(option, click.Option) or option.help, f"{path}: {option.name}"
        if isinstance(command, click.Group):
            for name, each in commands_of(command).items():
                walk((*path, name), each)

    walk((), main.cli)
    assert run("--version") == (0, f"sluiceway, version {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["produce"], "Missing argument 'QUEUE'"),
        (["produce", "q", "x", "--file", __file__], "not both"),
        (["produce", "q", "--file", "/does/not/exist"], "does not exist"),
        (["lease", "q", "--wait", "5"], "'5' is not a duration"),
        (["lease", "q", "-n", "0"], "'-n'"),
        (["complete", "q"], "pass item ids"),
        (["retry", "q"], "Missing argument 'ID...|-'"),
        (["retry", "q", "x", "--reason", "r"], "--reason needs --dead"),
        (["retry", "q", "x", "--dead", "--after", "1s"], "exclude each other"),
        (["work", "tasks:resize", "--queue", "a", "-q", "b"], "run `sluiceway work` once for each queue"),
        (["serve", "--data", "d", "--listen", "2319"], "not HOST:PORT"),
        (["serve", "--data", "d", "--listen", "localhost:99999"], "not HOST:PORT"),
        (["serve"], "Missing option '--data'"),
        (["nothing"], "No such command"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_wrong(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_exit_codes_follow_the_kind_of_error() -> None:
    codes = {code: exit_code(CallError(code, "")) for code in KINDS}
    assert {code for code, exit in codes.items() if exit == 4} == {
        "unavailable",
        "queue_paused",
        "too_many_requests",
        "rate_limited",
        "not_here",
        "storage_full",
    }
    assert {code for code, exit in codes.items() if exit == 5} == {"outcome_unknown"}
    assert {code for code, exit in codes.items() if exit == 1} == {"internal"}
    assert set(codes.values()) == {1, 3, 4, 5}
    assert exit_code(SluicewayError("invalid_request", "")) == 3


def test_no_server_is_4_and_says_how_to_start_one(run: Run) -> None:
    with closed_port() as port:
        url = f"http://127.0.0.1:{port}"
        code, out, err = run("stats", "q", "--url", url)
        assert (code, out) == (4, "")
        assert f"error: cannot reach {url}: Connection refused (unavailable)" in err
        assert "sluiceway dev" in err
        code, out, err = run("stats", "q", "--url", url, "--json")
        assert (code, out) == (4, "")
        assert '"code": "unavailable"' in err
        assert '"retryable": true' in err


def test_a_lost_answer_is_5(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, out, err = run("produce", "q", "x", "--url", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join(PATIENCE)
    assert (code, out) == (5, "")
    assert "outcome_unknown" in err
    assert "may or may not" in err


def test_every_command_takes_the_server_that_stands_before_it() -> None:
    """Who makes `Flags` by itself would call the default server in its place."""
    folder = Path(session.__file__).parent
    assert [path.name for path in folder.glob("*.py") if re.search(r"\bFlags\(", path.read_text())] == ["session.py"]


def test_an_audit_entry_says_what_was_set_to_nothing() -> None:
    assert admin._words("a queues.update q", {"max_attempts": 0, "dead_queue": None}) == "a queues.update q max_attempts=0 dead_queue=null"


@pytest.mark.parametrize("url", ["ftp://localhost:2319", "localhost", "http://"])
def test_a_wrong_url_is_refused(run: Run, url: str) -> None:
    code, _, err = run("stats", "q", "--url", url)
    assert code == 3
    assert "is not a URL such as http://127.0.0.1:2319" in err


def test_a_host_and_port_is_a_url(run: Run) -> None:
    code, _, err = run("stats", "q", "--url", "localhost:1")
    assert code == 4
    assert "cannot reach http://localhost:1" in err


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("ack", "sluiceway complete QUEUE"),
        ("consume", "sluiceway work MODULE:FUNCTION"),
        ("purge", "sluiceway queue clear NAME"),
        ("problems", "sluiceway doctor"),
        ("stop", "Ctrl-C, or SIGTERM to the server's or worker's process"),
        ("ui", "/ui"),
    ],
)
def test_a_word_of_other_queues_is_answered_with_ours(run: Run, word: str, instead: str) -> None:
    code, _, err = run(word, "q")
    assert code == 2
    assert f"No such command '{word}'. Use " in err
    assert instead in err


@pytest.mark.parametrize(("word", "instead"), [("purge", "clear"), ("rm", "delete"), ("describe", "info"), ("stop", "pause")])
def test_so_is_one_for_a_command_on_queues(run: Run, word: str, instead: str) -> None:
    code, _, err = run("queue", word, "q")
    assert code == 2
    assert f"No such command '{word}'. Use sluiceway queue {instead}." in err


def test_options_of_the_server_and_of_the_output_may_stand_before_the_command(run: Run) -> None:
    code, _, err = run("--url", "http://127.0.0.1:1", "--json", "queue", "info", "q")
    assert code == 4
    problem = json.loads(err)
    assert "cannot reach http://127.0.0.1:1" in problem["detail"]
    assert problem["hint"] == "is a server running at http://127.0.0.1:1? Start one: sluiceway dev"
    code, _, err = run("--url", "http://127.0.0.1:1", "queue", "info", "q", "--url", "http://127.0.0.1:2")
    assert "cannot reach http://127.0.0.1:2" in err, "the nearer one counts"


def test_the_demo_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("sluiceway.demo"):
                raise ModuleNotFoundError("No module named 'pyspark'", name="pyspark")

    for name in [name for name in sys.modules if name.startswith("sluiceway.demo")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    code, _, err = run("demo")
    assert code == 1
    assert "needs pyspark; install it with: pip install 'sluiceway[demo]'" in err


# -- lines --------------------------------------------------------------------------------------------------------------


class Trickle:
    """A stream that gives one piece at a time, as a slow pipe does."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = list(pieces)

    def read1(self, size: int, /) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\nb\n"], [b"a", b"b"]),
        ([b"a\nb"], [b"a", b"b"]),
        ([b"a\r\n\r\n\n", b"b\rc\n"], [b"a", b"", b"", b"b\rc"]),
        ([b"a", b"b", b"c\nd", b"\n", b"e"], [b"abc", b"d", b"e"]),
        ([b"a\r", b"\nb"], [b"a", b"b"]),
        ([b"\n"], [b""]),
        ([], []),
        (["é".encode() + b"\xff\x00\n"], ["é".encode() + b"\xff\x00"]),
    ],
)
def test_lines_are_cut_whatever_the_pieces(pieces: list[bytes], expected: list[bytes]) -> None:
    assert [line for line in line_producer._lines(Trickle(*pieces)) if line is not None] == expected


def test_a_call_carries_at_most_1_000_lines_and_not_too_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(call) for call in line_producer._calls(b"x" for _ in range(2_500))] == [1_000, 1_000, 500]
    monkeypatch.setattr(line_producer, "CALL_BYTES", 10)
    assert list(line_producer._calls([b"12345", b"12345", b"6", b"x" * 50, b"7"])) == [[b"12345", b"12345"], [b"6"], [b"x" * 50], [b"7"]]


def test_what_trickles_in_is_sent_at_once_unless_the_cut_must_repeat() -> None:
    def arriving() -> Trickle:
        return Trickle(b"a\nb\n", b"c\n", b"d")

    assert list(line_producer._calls(line_producer._lines(arriving()), prompt=True)) == [[b"a", b"b"], [b"c"], [b"d"]]
    assert list(line_producer._calls(line_producer._lines(arriving()))) == [[b"a", b"b", b"c", b"d"]]


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"plain \xc3\xa9", "plain é"),
        (b"\x1b[31mred\x07\r\n", "\\x1b[31mred\\x07\\r\\n"),
        (b"\xff", "\\xff"),
        ("\u202eback".encode(), "\\u202eback"),
        (b"x" * 201, "x" * 200 + "…"),
        (b"x" * 200, "x" * 200),
        ("é".encode() * 900, "é" * 200 + "…"),
    ],
)
def test_a_payload_cannot_steer_the_terminal(payload: bytes, shown: str) -> None:
    assert printable(payload) == shown


def test_nor_can_a_cell_or_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(table(("version",), [("1\x1b[2J",)]))
    assert capsys.readouterr().out.splitlines()[1] == "1\\x1b[2J"
    said = CallError("a\x1b[8m", "one\r\ntwo \x9b31m", ignored=[Ignored(id="id\a", reason="re\bason")], kind=KINDS["stale_ids"])
    Failure(said).show()
    assert capsys.readouterr().err.splitlines() == ["error: one\\r", "two \\x9b31m (a\\x1b[8m)", "ignored id\\x07: re\\x08ason"]


def test_a_number_is_never_cut_short(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(table(("some", "count"), [("x" * 30, 123_456_789)], right=("count",)))
    assert capsys.readouterr().out.splitlines()[1] == "x" * 30 + "  123,456,789"


def test_chunks() -> None:
    assert list(chunks(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(chunks([], 2)) == []


def test_the_data_directory_of_a_running_server_is_refused(run: Run, tmp_path: Path) -> None:
    from sluiceway.adapters.lock import DirectoryLock

    lock = DirectoryLock(tmp_path)
    code, _, err = run("serve", "--data", str(tmp_path), "--listen", "127.0.0.1:0")
    lock.release()
    assert code == 4
    assert "is in use by the process" in err


def test_a_server_that_cannot_start_says_why(run: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for command in (("serve", "--listen", f"127.0.0.1:{port}"), ("dev", "--no-demo", "--port", str(port))):
            code, _, err = run(*command, "--data", str(tmp_path))
            assert code == 1
            assert "Address already in use" in err
            assert "Traceback" not in err


def test_the_demo_refuses_what_it_cannot_kill(run: Run) -> None:
    code, _, err = run("demo", "--kill", "nothing")
    assert code in (2, 3)
    assert "nothing" in err
    assert "server-ingest" in err


def test_other_machines_are_kept_out_unless_it_is_wanted(run: Run, tmp_path: Path) -> None:
    code, _, err = run("serve", "--data", str(tmp_path), "--listen", "0.0.0.0:0", "--auth", "none")
    assert code == 3
    assert "insecure" in err


def test_a_move_that_failed_in_part_is_an_error_after_what_it_did(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"a": "unavailable", "b": "outcome_unknown", "c": "gone"}

    def some_failed(client: Client, queue: str, ids: list[str], target: str | None) -> MovedItems:
        return MovedItems(matched=1, moved=1, ignored=[Left(id=each, reason=reasons[each]) for each in ids if each in reasons])

    monkeypatch.setattr(Client, "move_items", some_failed)
    code, out, err = run("move", "q", "a", "b", "c", "d", "--to", "other")
    assert (code, out) == (5, "Moved 1\nignored a: unavailable\nignored b: outcome unknown\nignored c: gone\n")
    assert "2 ids failed; repeating the command is safe (outcome_unknown)" in err
    assert run("move", "q", "a", "d", "--to", "other")[0] == 4
    assert run("move", "q", "c", "d", "--to", "other")[0] == 0
