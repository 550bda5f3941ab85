"""What `omnirelay` says where it is given what it cannot use: a line with a remedy and an exit code, no traceback."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.cli import main
from lease_core.errors import InvalidInput, StoreUnavailable
from lease_core.replication import ObjectStoreSink, read_segments
from lease_core.replication.hub.addresses import parse
from lease_core.replication.sinks import object_store
from tests.copies import queue_with_copies

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A queue with five events, and copies of its log in ``lines``, ``objects`` and ``table.db``."""
    return queue_with_copies(tmp_path)


def told(capsys: Captured, *arguments: str, code: int = 2) -> str:
    """What the command says, in a line of its own."""
    assert main(arguments) == code
    said = capsys.readouterr()
    return (said.out + said.err).strip()


# What a user can act on is told in a line


def test_a_snapshot_to_nowhere_is_refused_with_the_folder(url: str, tmp_path: Path, capsys: Captured) -> None:
    said = told(capsys, "snapshot", url, f"{tmp_path}/nodir/x", "--namespace", "landing")
    assert said == f"omnirelay snapshot: file: the directory {tmp_path}/nodir does not exist; " + (
        "create it, or change the path"
    )
    (tmp_path / "taken").mkdir()
    said = told(capsys, "snapshot", url, f"{tmp_path}/taken", "--namespace", "landing")
    assert said.startswith(f"omnirelay snapshot: path: {tmp_path}/taken cannot be a file")


def test_a_path_that_a_command_cannot_use_is_told_and_not_traced(url: str, tmp_path: Path, capsys: Captured) -> None:
    arguments = ("rebuild", url, f"sqlite:///{tmp_path}/r.db", "--namespace", "landing", "--snapshot", "/no/file")
    said = told(capsys, *arguments)
    assert "/no/file" in said
    assert "\n" not in said


def test_a_database_that_is_away_is_told_in_a_line(capsys: Captured) -> None:
    said = told(capsys, "verify", "postgresql://me:hunter2@127.0.0.1:1/gone")
    assert said.startswith("omnirelay verify: the database cannot be used (")
    assert "\n" not in said
    assert "hunter2" not in said


def test_an_object_store_that_is_away_is_told_in_a_line_without_secrets(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "AWS_ENDPOINT": "http://me:hunter2@127.0.0.1:1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "AWS_REGION": "x",
        "AWS_MAX_RETRIES": "0",
    }.items():
        monkeypatch.setenv(name, value)
    said = told(capsys, "verify", "s3://bucket/x")
    assert said.startswith("omnirelay verify: the copy's object store cannot be read (GenericError: ")
    assert "\n" not in said
    assert "hunter2" not in said


def test_every_way_to_read_segments_translates_what_the_store_says(url: str, tmp_path: Path) -> None:
    from obstore.exceptions import GenericError

    def away(*_: object, **__: object) -> None:
        raise GenericError("GET https://me:hunter2@store/x?signature=hunter2 failed\n\nDebug source: hunter2")

    copy = read_segments(f"file://{tmp_path}/objects", "landing")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(object_store, "segment", away)
        for read in (lambda: copy.events(0, 1), lambda: list(copy.seals()), lambda: copy.queue_id):
            with pytest.raises(StoreUnavailable, match="check its address") as said:
                read()
            assert "hunter2" not in str(said.value)
        patched.setattr(object_store, "keys", away)
        with pytest.raises(StoreUnavailable, match="check its address"):
            copy.first()
        patched.setattr("obstore.list_with_delimiter", away)
        with pytest.raises(StoreUnavailable, match="check its address"):
            read_segments(f"file://{tmp_path}/objects")


def test_a_folder_that_cannot_be_made_is_named_as_a_bad_url() -> None:
    with pytest.raises(InvalidInput, match="url: cannot be opened"):
        ObjectStoreSink("file:///proc/nowhere")


def test_an_address_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(InvalidInput, match="url: must be text such as s3://bucket/path, not int"):
        ObjectStoreSink(5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="address: must be host:port, not int"):
        parse("address", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("days", ["1e12", "0", "-1"])
def test_days_that_no_calendar_has_are_refused(days: str, tmp_path: Path, capsys: Captured) -> None:
    said = told(capsys, "hub", "--url", f"sqlite:///{tmp_path}/hub.db", "--keep-days", days)
    assert "keep_days" in said
    assert "\n" not in said


# What only reads makes nothing


def test_what_was_mistyped_is_refused_and_not_made(url: str, tmp_path: Path, capsys: Captured) -> None:
    """A file or a name that was made by looking at it would be empty, and found good."""
    before = sorted(tmp_path.iterdir())
    for source, reason in (
        (f"sqlite:///{tmp_path}/missing.db", f"url: there is no file {tmp_path}/missing.db"),
        ("sqlite://", "url: names no file"),
        (f"table:sqlite:///{tmp_path}/missing.db", f"url: there is no file {tmp_path}/missing.db"),
        (f"file://{tmp_path}/nofolder", f"source: there is no folder {tmp_path}/nofolder"),
    ):
        for arguments in (("verify", source), ("rebuild", source, f"sqlite:///{tmp_path}/rebuilt.db")):
            assert told(capsys, *arguments).startswith(f"omnirelay {arguments[0]}: {reason}")
    assert "there is no file" in told(
        capsys, "verify", url, "--tables", f"sqlite:///{tmp_path}/missing.db", "--namespace", "landing"
    )
    assert "there is no file" in told(capsys, "snapshot", f"sqlite:///{tmp_path}/missing.db", f"{tmp_path}/x")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("server", ["sqlite", "postgres"])
def test_a_namespace_that_was_mistyped_is_refused_and_not_made(
    server: str, tmp_path: Path, capsys: Captured, request: pytest.FixtureRequest
) -> None:
    url = f"sqlite:///{tmp_path}/queue.db" if server == "sqlite" else request.getfixturevalue("postgres_url")
    LeaseQueue.migrate(url)
    said = told(capsys, "verify", url, "--namespace", "typo")
    assert said == "omnirelay verify: namespace: the database has no 'typo', but nothing yet; check the name"
    LeaseQueue.open(url, "landing").close()
    for arguments in (("verify", url), ("snapshot", url, f"{tmp_path}/snapshot")):
        said = told(capsys, *arguments, "--namespace", "typo")
        assert said == f"omnirelay {arguments[0]}: namespace: the database has no 'typo', but landing; check the name"
    assert not (tmp_path / "snapshot").exists()
    assert told(capsys, "verify", url, "--namespace", "landing", code=0) == "good up to event 0, which is the last"


@pytest.mark.parametrize("copy", ["queue", "lines", "objects"])
def test_verifying_from_beyond_the_end_is_refused(copy: str, url: str, tmp_path: Path, capsys: Captured) -> None:
    source = {"queue": url, "lines": f"jsonl:{tmp_path}/lines", "objects": f"file://{tmp_path}/objects"}[copy]
    arguments = ("verify", source, "--namespace", "landing", "--after")
    for beyond in ("6", "99"):
        assert f"--after: is {beyond}, but the log ends before that event" in told(capsys, *arguments, beyond)
    assert "--after: must be 0 or more" in told(capsys, *arguments, "-1")
    for within in ("3", "5"):
        assert told(capsys, *arguments, within, code=0) == "good up to event 5, which is the last"


def test_verifying_after_what_was_pruned_goes_on(url: str, capsys: Captured) -> None:
    with LeaseQueue.open(url, "landing") as queue:
        for reader in queue.readers():
            queue.drop_reader(reader)
        assert queue.prune_events(before=4) == 3
    said = told(capsys, "verify", url, "--namespace", "landing", "--after", "3", code=0)
    assert said == "good up to event 5, which is the last"


# Addresses of sources


def test_a_table_is_read_by_the_source_that_its_sink_was_given(url: str, tmp_path: Path, capsys: Captured) -> None:
    table = f"table:sqlite:///{tmp_path}/table.db"
    said = told(capsys, "verify", f"{table}?source=eu", "--namespace", "landing", code=0)
    assert said == "good up to event 5, which is the last"
    assert "holds no event of namespace" in told(capsys, "verify", table, "--namespace", "landing")
    assert "give one" in told(capsys, "verify", f"{table}?source=eu&source=us", "--namespace", "landing")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("hub:localhost:1", "does not say whose log the hub is to give: add its name, as in hub:host:port/source"),
        ("hub:localhost:1/", "does not say whose log"),
        ("hub:localhost:1?ca=x", "does not say whose log"),
        ("hub:localhost:1/eu?colour=red", "a hub has no 'colour'; there are ca, certificate, key"),
        ("hub:localhost:1/eu?ca", "ca must be given once, with a value"),
        ("hub:localhost:1/eu?key=a&key=b", "key must be given once, with a value"),
        ("hub:localhost:1/eu?insecure=perhaps", "insecure must be true or false (got 'perhaps')"),
        ("hub:localhost/eu", "must be host:port"),
        ("hub:localhost:1/eu?ca=/no/file", "ca: /no/file cannot be read"),
    ],
)
def test_a_hub_that_is_not_named_as_it_should_be_is_told_how(address: str, reason: str, capsys: Captured) -> None:
    assert reason in told(capsys, "verify", address)


# The command itself


def test_it_says_its_version(capsys: Captured) -> None:
    assert told(capsys, "--version", code=0) == f"omnirelay {version('omnirelay-dagster')}"


def test_a_setting_that_is_missing_is_told_with_where_to_give_it(tmp_path: Path, capsys: Captured) -> None:
    said = told(capsys, "relay")
    assert said == "omnirelay relay: relay: is missing: give relay.url in the file that --config names, " + (
        "or OMNIRELAY_RELAY__URL"
    )
    config = tmp_path / "omnirelay.toml"
    config.write_text('[relay]\nurl = "sqlite:///x"\n[sinks.files]\npath = "x"\n')
    said = told(capsys, "relay", "--config", str(config))
    assert said.endswith(f"is missing: give sinks.files.type in {config}, or OMNIRELAY_SINKS__FILES__TYPE")
    assert "hub.url: is missing: give --url, or hub.url in" in told(capsys, "hub")


def test_a_command_that_cannot_be_loaded_says_what_would_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    (tmp_path / "lame.py").write_text("import grpc_is_not_here")
    info = tmp_path / "lame-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lame\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[omnirelay.commands]\nlame = lame\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = told(capsys, "lame", "--any", "option")
    assert said.startswith("omnirelay lame: it cannot be loaded (No module named 'grpc_is_not_here'); install what")
    (tmp_path / "lame.py").write_text("raise ModuleNotFoundError(\"No module named 'grpc'\", name='grpc')")
    assert told(capsys, "lame").endswith("(No module named 'grpc'); pip install 'omnirelay-dagster[grpc]'")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "not usable here: it cannot be loaded" in " ".join(capsys.readouterr().out.split())
