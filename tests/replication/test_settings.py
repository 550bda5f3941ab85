"""Configuration from a file and the environment, sinks by entry point, and the command that runs it all."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lease_core import LeaseQueue
from lease_core.cli import main
from lease_core.errors import InvalidConfig
from lease_core.replication import JsonlSink, Relay, each_event, read_jsonl, read_sql
from lease_core.replication.settings import load_settings
from lease_core.replication.sinks.options import fit_options
from lease_core.replication.sinks.registry import make_sink, sink_types
from tests.replication.conftest import work

if TYPE_CHECKING:
    from decimal import Decimal  # not there when a sink is made

FILE = """
[relay]
url = "sqlite:///{folder}/queue.db"
interval = 0.05

[sinks.files]
type = "jsonl"
path = "{folder}/copy"
batch_size = 50

[sinks.Elsewhere]
type = "sql"
url = "${{COPY_URL}}"
enabled = false
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "omnirelay.toml"
    path.write_text(FILE.format(folder=tmp_path))
    return path


def test_the_environment_overrides_the_file(config: Path, tmp_path: Path) -> None:
    copy = {"COPY_URL": "sqlite:///x.db"}
    settings = load_settings(config, copy)
    assert list(settings.enabled()) == ["files"]
    assert settings.rules()["files"].batch_size == 50
    [sink] = settings.make_sinks()
    assert isinstance(sink, JsonlSink)
    settings = load_settings(
        config,
        copy
        | {
            "OMNIRELAY_RELAY__NAMESPACE": "other",
            "OMNIRELAY_SINKS__FILES__BATCH_SIZE": "7",
            "OMNIRELAY_SINKS__FILES__SHARD": "eu-1",
            "OMNIRELAY_SINKS__ELSEWHERE__ENABLED": "true",
            "OMNIRELAY_SINKS__ADDED__TYPE": "memory",
        },
    )
    assert settings.relay.namespace == "other"
    assert sorted(settings.enabled()) == ["Elsewhere", "added", "files"]
    assert settings.rules()["files"].batch_size == 7
    assert [getattr(sink, "shard", None) for sink in settings.make_sinks()] == ["eu-1", None, None]


def test_the_environment_alone_will_do(tmp_path: Path) -> None:
    settings = load_settings(
        None,
        {"OMNIRELAY_RELAY__URL": "sqlite://", "OMNIRELAY_SINKS__M__TYPE": "memory", "OMNIRELAY_OTHER": "ignored"},
    )
    assert [sink.name for sink in settings.make_sinks()] == ["m"]


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({}, "COPY_URL"),
        ({"COPY_URL": "s", "OMNIRELAY_SINKS__FILES__BATCH_SIZE": "none"}, "sinks.files.batch_size"),
        ({"COPY_URL": "s", "OMNIRELAY_SINKS__FILES__ON_REFUSAL": "cry"}, "sinks.files.on_refusal"),
        ({"COPY_URL": "s", "OMNIRELAY_RELAY__INTERVAL": "0"}, "relay.interval"),
        ({"COPY_URL": "s", "OMNIRELAY_RELAY__COLOUR": "red"}, "relay.colour"),
        ({"COPY_URL": "s", "OMNIRELAY_RELAY__URL__DEEPER": "x"}, "relay.url.deeper"),
    ],
)
def test_what_is_wrong_is_named(config: Path, environment: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field.replace(".", r"\.")):
        load_settings(config, environment)


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="nowhere"):
        load_settings(tmp_path / "nowhere.toml", {})
    (tmp_path / "bad.toml").write_text("relay = [")
    with pytest.raises(InvalidConfig, match="not TOML"):
        load_settings(tmp_path / "bad.toml", {})


def test_wrong_options_of_a_sink_are_named_without_their_values() -> None:
    with pytest.raises(InvalidConfig, match="colour") as wrong:
        make_sink("jsonl", "files", {"path": "x", "colour": "hunter2"})
    assert "hunter2" not in str(wrong.value)
    with pytest.raises(InvalidConfig, match="there are http, hub, jsonl"):
        make_sink("carrier-pigeon", "p", {})


@pytest.mark.parametrize(
    ("kind", "options", "field"),
    [
        ("http", {"url": "ftp://me:hunter2@x"}, "sinks.second.url"),
        ("jsonl", {"path": "x", "max_bytes": 0}, "sinks.second.max_bytes"),
        ("hub", {"address": "nowhere"}, "sinks.second.address"),
        ("carrier-pigeon", {}, "sinks.second.type"),
    ],
)
def test_a_sink_that_cannot_be_made_is_named(kind: str, options: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidConfig) as wrong:
        make_sink(kind, "second", options)
    assert wrong.value.field == field
    assert "hunter2" not in str(wrong.value)


def sink_by_environment(**options: str) -> Any:
    """The sink ``s`` of these settings in the environment."""
    environment = {f"OMNIRELAY_SINKS__S__{option.upper()}": value for option, value in options.items()}
    [sink] = load_settings(None, {"OMNIRELAY_RELAY__URL": "sqlite://"} | environment).make_sinks()
    return sink


def test_nothing_goes_to_another_machine_in_the_clear_because_a_flag_is_text() -> None:
    encrypted = sink_by_environment(type="hub", address="hub.example:1", insecure="false", begin_late="false")
    assert encrypted._client._credentials is not None
    assert encrypted._begin_late is False
    plain = sink_by_environment(type="hub", address="hub.example:1", insecure="true", begin_late="TRUE", timeout="5")
    assert plain._client._credentials is None
    assert (plain._begin_late, plain._timeout) == (True, 5.0)


def test_text_becomes_what_the_sink_takes(tmp_path: Path) -> None:
    files = sink_by_environment(type="jsonl", path=str(tmp_path), fsync="false", max_bytes="1000")
    assert (files._fsync, files._max_bytes) == (False, 1000)
    assert sink_by_environment(type="memory", capacity="7")._capacity == 7
    endpoint = sink_by_environment(type="http", url="http://x", headers='{"X-Key": "1"}', timeout="2.5")
    assert (endpoint._headers, endpoint._timeout) == ({"X-Key": "1"}, 2.5)
    by_parts = sink_by_environment(type="http", url="http://x", headers__accept="text/plain")
    assert by_parts._headers == {"accept": "text/plain"}


@pytest.mark.parametrize(
    ("said", "meant"), [("false", False), ("True", True), ("0", False), ("/etc/ca.pem", "/etc/ca.pem")]
)
def test_what_may_be_a_flag_or_a_path_is_either(said: str, meant: bool | str) -> None:
    assert sink_by_environment(type="http", url="http://x", verify=said)._verify == meant


@pytest.mark.parametrize(
    ("kind", "options", "said"),
    [
        ("hub", {"address": 5}, "sinks.s.address: must be text"),
        ("hub", {"address": "x:1", "insecure": "hunter2"}, "sinks.s.insecure: must be true or false"),
        ("http", {"url": "http://x", "timeout": "hunter2"}, "sinks.s.timeout: must be a number"),
        ("http", {"url": "http://x", "headers": {"X-Key": 5}}, "sinks.s.headers.X-Key: must be text"),
        ("http", {"url": "http://x", "headers": "hunter2"}, "sinks.s.headers: must be a table (in the environment"),
        ("jsonl", {"path": "x", "max_bytes": "hunter2"}, "sinks.s.max_bytes: must be a whole number"),
        ("jsonl", {"path": 5}, "sinks.s.path: must be text or a path"),
        ("nats", {"servers": 5}, "sinks.s.servers: must be text or a list"),
    ],
)
def test_an_option_of_the_wrong_type_is_named_without_its_value(
    kind: str, options: dict[str, object], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=f"^{re.escape(said)}") as wrong:
        make_sink(kind, "s", options)
    assert "hunter2" not in str(wrong.value)


def test_options_fit_what_a_sink_says_and_are_left_alone_where_it_says_nothing() -> None:
    def factory(
        name: str,
        bare,
        flag: bool,
        unheard_of: Decimal,
        several: Iterable[int],
        flags: dict[str, bool],
        **more: int,
    ) -> None: ...

    given = {"bare": "1", "flag": "no", "unheard_of": "1", "several": ["1"], "flags": {"a": "no"}, "other": "1"}
    fitted = {"bare": "1", "flag": False, "unheard_of": "1", "several": ["1"], "flags": {"a": False}, "other": 1}
    assert fit_options(factory, given) == fitted
    assert fit_options(dict, {"a": "1"}) == {"a": "1"}


def test_an_installed_package_adds_a_sink_without_touching_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pigeon.py").write_text(
        "from __future__ import annotations\n"
        "class PigeonSink:\n"
        "    def __init__(self, name, loft, *, homing: bool = True):\n"
        "        self.name, self.loft, self.homing, self.sent = name, loft, homing, 0\n"
        "    def deliver(self, batch):\n"
        "        self.sent += len(batch)\n"
    )
    info = tmp_path / "pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[omnirelay.sinks]\npigeon = pigeon:PigeonSink\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "pigeon" in sink_types()
    sink: Any = make_sink("pigeon", "p1", {"loft": "1", "homing": "false"})
    assert (sink.name, sink.loft, sink.homing) == ("p1", "1", False)


# The command


def test_once_delivers_everything_and_says_how_it_went(
    config: Path, queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 100)
    monkeypatch.setenv("COPY_URL", f"sqlite:///{tmp_path}/copy.db")
    monkeypatch.setenv("OMNIRELAY_SINKS__ELSEWHERE__ENABLED", "true")
    assert main(["relay", "--config", str(config), "--once"]) == 0
    assert list(read_jsonl(tmp_path / "copy").read(strict=True)) == list(each_event(queue))
    assert list(read_sql(f"sqlite:///{tmp_path}/copy.db", "resourcelease").read()) == list(each_event(queue))


def test_once_fails_if_a_sink_does(
    config: Path, queue: LeaseQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work(queue, 1)
    monkeypatch.setenv("COPY_URL", f"sqlite:///{tmp_path}/no/such/folder.db")
    monkeypatch.setenv("OMNIRELAY_SINKS__ELSEWHERE__ENABLED", "true")
    assert main(["relay", "--config", str(config), "--once"]) == 1


def test_bad_configuration_is_told_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["relay", "--config", str(tmp_path / "nowhere.toml")]) == 2
    assert capsys.readouterr().err.startswith("omnirelay relay: config: ")


def test_the_process_follows_the_queue_and_stops_on_sigterm(config: Path, queue: LeaseQueue, tmp_path: Path) -> None:
    work(queue, 50)
    relay = subprocess.Popen(
        [sys.executable, "-m", "lease_core.cli", "relay", "--config", str(config)],
        env=os.environ | {"COPY_URL": "x"},
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        head = work(queue, 50)
        while queue.readers().get("relay/files") != head:
            assert time.monotonic() < deadline, "the relay did not catch up"
            assert relay.poll() is None
            time.sleep(0.05)
    finally:
        relay.send_signal(signal.SIGTERM)
        _, said = relay.communicate(timeout=30)
    assert relay.returncode == 0, said
    assert b"sink files is running at event" in said
    assert list(read_jsonl(tmp_path / "copy").read(strict=True)) == list(each_event(queue))


@pytest.mark.parametrize(
    "url", ["sqlite:///{folder}/typo.db", "sqlite:///{folder}/no/typo.db", "postgresql://127.0.0.1:1/x"]
)
def test_once_does_not_wait_for_a_queue_that_is_not_there(
    url: str, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is run by cron, which would start one after the other."""
    monkeypatch.setenv("COPY_URL", "x")
    monkeypatch.setenv("OMNIRELAY_RELAY__URL", url.format(folder=tmp_path))
    assert main(["relay", "--config", str(config), "--once"]) == 1
    assert "nothing was delivered: " in caplog.text
    assert not list(tmp_path.rglob("typo*"))


def test_a_sink_that_cannot_be_made_is_told_before_the_queue_is_waited_for(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COPY_URL", "no url at all")
    monkeypatch.setenv("OMNIRELAY_RELAY__URL", f"sqlite:///{tmp_path}/not/yet.db")
    monkeypatch.setenv("OMNIRELAY_SINKS__ELSEWHERE__ENABLED", "true")
    assert main(["relay", "--config", str(config)]) == 2
    assert "is not a database URL" in capsys.readouterr().err
    monkeypatch.delenv("OMNIRELAY_SINKS__ELSEWHERE__ENABLED")
    monkeypatch.setenv("OMNIRELAY_SINKS__FILES__ON_REFUSAL", "skip")
    assert main(["relay", "--config", str(config)]) == 2
    assert "refused: sink files is to skip what it refuses" in capsys.readouterr().err


def test_an_option_of_the_wrong_type_is_told_without_a_traceback(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COPY_URL", "x")
    config.write_text(config.read_text() + '[sinks.web]\ntype = "http"\nurl = 5\n')
    assert main(["relay", "--config", str(config)]) == 2
    assert capsys.readouterr().err.startswith("omnirelay relay: sinks")


def test_the_process_ends_when_every_sink_has_stopped(config: Path, queue: LeaseQueue, tmp_path: Path) -> None:
    """Whoever watches it should see that nothing is delivered any more, and why."""
    work(queue, 5)
    with LeaseQueue.open(f"sqlite:///{tmp_path}/another.db") as another:
        head = work(another, 50)
        with Relay(another, [JsonlSink(tmp_path / "copy")]) as relay:
            assert relay.wait_until(head, 60)
    done = subprocess.run(
        [sys.executable, "-m", "lease_core.cli", "relay", "--config", str(config)],
        env=os.environ | {"COPY_URL": "x"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "every sink has stopped: files: HistoryDiffers: sink files holds events up to" in done.stderr
