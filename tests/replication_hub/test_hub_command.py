"""`omnirelay hub`: its settings, its start and its stop; and the published description of the service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.cli import main
from lease_core.errors import InvalidConfig
from lease_core.replication import each_event, read_hub
from lease_core.replication.hub.settings import load_hub_settings
from lease_core.replication.hub.wire import proto
from tests.replication.conftest import work
from tests.replication_hub.batches import batch, publish
from tests.replication_hub.hub_process import HubProcess

ROOT = Path(__file__).parent.parent.parent


def test_a_relay_and_a_hub_as_processes(hub_process: HubProcess, tmp_path: Path) -> None:
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        head = work(queue, 100)
        config = tmp_path / "relay.toml"
        config.write_text(
            f'[relay]\nurl = "sqlite:///{tmp_path}/queue.db"\n'
            f'[sinks.hub]\ntype = "hub"\naddress = "{hub_process.address}"\nsource = "eu-1"\n'
        )
        assert main(["relay", "--config", str(config), "--once"]) == 0
        assert queue.readers() == {"relay/hub": head}
        assert list(each_event(read_hub(hub_process.address, "eu-1"))) == list(each_event(queue))


def test_it_stops_in_order_while_streams_are_open(hub_process: HubProcess) -> None:
    copy = read_hub(hub_process.address, "a", "n")
    publish(hub_process.address, [batch(1, 50)])
    assert len(copy.events(0, 10)) == 10
    assert hub_process.stop() == 0
    assert "the hub has stopped" in hub_process.log()
    hub_process.start()
    assert publish(hub_process.address, [batch(51, 60)])[0][:2] == ("STORED", 61)


def test_file_environment_and_command_line_each_override_the_one_before(tmp_path: Path) -> None:
    config = tmp_path / "omnirelay.toml"
    config.write_text('[hub]\nurl = "${HUB_URL}"\nlisten = "127.0.0.1:1"\nmost_bytes = 2000000\n[relay]\nurl = "x"\n')
    environment = {"HUB_URL": "sqlite:///hub.db", "OMNIRELAY_HUB__LISTEN": "127.0.0.1:2"}
    settings = load_hub_settings(config, environment, {"key": None})
    assert (settings.url, settings.listen, settings.most_bytes) == ("sqlite:///hub.db", "127.0.0.1:2", 2_000_000)
    assert load_hub_settings(config, environment, {"listen": "127.0.0.1:3"}).listen == "127.0.0.1:3"


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({}, "hub.url"),
        ({"OMNIRELAY_HUB__URL": "x", "OMNIRELAY_HUB__COLOUR": "red"}, "hub.colour"),
        ({"OMNIRELAY_HUB__URL": "x", "OMNIRELAY_HUB__MOST_BYTES": "none"}, "hub.most_bytes"),
    ],
)
def test_what_is_wrong_is_named(environment: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidConfig, match=field.replace(".", r"\.")):
        load_hub_settings(None, environment)


def test_bad_options_end_the_command_with_a_reason_and_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMNIRELAY_HUB__URL", "mysql://me:hunter2@localhost/x")
    assert main(["hub"]) == 2
    assert main(["hub", "--url", f"sqlite:///{tmp_path}/hub.db", "--listen", "0.0.0.0:1"]) == 2
    said = capsys.readouterr().err
    assert "url" in said
    assert "listen" in said
    assert "hunter2" not in said


def test_a_database_in_a_folder_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was waited for, though nobody else would make it."""
    assert main(["hub", "--url", f"sqlite:///{tmp_path}/nodir/hub.db", "--listen", "127.0.0.1:0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"omnirelay hub: url: the directory {tmp_path}/nodir does not exist; create it")


def test_the_generated_code_is_that_of_the_published_description(tmp_path: Path) -> None:
    folder = Path("lease_core/replication/hub")
    assert proto() == (ROOT / folder / "hub.proto").read_bytes()
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}",
            f"--grpc_python_out={tmp_path}", str(folder / "hub.proto"),
        ],
        cwd=ROOT,
        check=True,
    )  # fmt: skip
    for name in ("hub_pb2.py", "hub_pb2.pyi", "hub_pb2_grpc.py"):
        assert (tmp_path / folder / name).read_text() == (ROOT / folder / name).read_text(), name
