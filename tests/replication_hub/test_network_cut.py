"""The link between source and hub goes down and comes back, by the kernel: packets vanish, and nobody is told."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lease_core import LeaseQueue
from lease_core.replication import Backoff, HubSink, Relay, Rules, each_event, read_hub
from tests.replication.conftest import work

ROOT = Path(__file__).parents[2]
HUB, SOURCE = "10.213.7.1", "10.213.7.2"
RULES = Rules(batch_size=50, backoff=Backoff(0.02, 0.2))

# In a user, network and mount name space of its own, where `ip netns` may keep its names in a /run of its own too:
# the hub's end stays here, the source's end is in the name space `source`, and a cable runs between them.
LINK = f"""
set -e
mount -t tmpfs tmpfs /run
ip link set lo up
ip netns add source
ip link add hub0 type veth peer name source0
ip link set source0 netns source
ip addr add {HUB}/30 dev hub0
ip link set hub0 up
ip -n source addr add {SOURCE}/30 dev source0
ip -n source link set source0 up
ip -n source link set lo up
"""
APART = ["unshare", "--user", "--map-root-user", "--net", "--mount", "sh", "-c"]


def test_a_link_that_goes_down_and_comes_back_loses_nothing(tmp_path: Path) -> None:
    missing = [tool for tool in ("unshare", "ip") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"cannot cut a real network link: {' and '.join(missing)} not installed")
    probe = subprocess.run([*APART, LINK], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"cannot cut a real network link here, no network may be made: {probe.stderr.strip()[-200:]}")
    script = f'{LINK}\nexec "$0" -m tests.replication_hub.test_network_cut hub "$1"'
    done = subprocess.run([*APART, script, sys.executable, str(tmp_path)], cwd=ROOT, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()[-4_000:]


def until(condition: Callable[[], bool], shown: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, shown()
        time.sleep(0.01)


def beside_the_hub(folder: Path) -> None:
    """Runs the hub, and the source behind the link; cuts the link, and compares in the end."""
    from tests.replication_hub.hub_process import HubProcess

    hub = HubProcess(f"sqlite:///{folder}/hub.db", folder / "hub.log", "--insecure", host=HUB)
    with hub:
        inside = ["ip", "netns", "exec", "source", sys.executable, "-m", __spec__.name, "source", str(folder)]
        source = subprocess.Popen([*inside, hub.address], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert source.stdin is not None
        assert source.stdout is not None
        try:
            for there, state in (("delivered", "down"), ("noticed", "up")):
                assert source.stdout.readline() == f"{there}\n".encode()
                subprocess.run(["ip", "link", "set", "hub0", state], check=True)
                source.stdin.write(f"{state}\n".encode())
                source.stdin.flush()
            assert source.stdout.readline() == b"done\n"
            assert source.wait(60) == 0
        finally:
            source.kill()
            source.wait()
        with LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue:
            assert list(read_hub(hub.address, "a", insecure=True).read()) == list(each_event(queue))


def behind_the_link(folder: Path, address: str) -> None:
    """Goes on working whatever happens to the link, and says what it notices of it."""
    with LeaseQueue.open(f"sqlite:///{folder}/queue.db") as queue:
        sink = HubSink(address, source="a", timeout=0.5, insecure=True)
        with Relay(queue, sink, rules=RULES, interval=0.01) as relay:
            assert relay.wait_until(work(queue, 100), 60), relay.status()
            say("delivered")
            assert sys.stdin.readline() == "down\n"
            until(lambda: bool(work(queue, 100)) and relay.status()[0].state == "retrying", relay.status)
            say("noticed")
            assert sys.stdin.readline() == "up\n"
            assert relay.wait_until(queue.stats().head, 60), relay.status()
            assert relay.status()[0].state == "running"
    say("done")


def say(word: str) -> None:
    print(word, flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "hub":
        beside_the_hub(Path(sys.argv[2]))
    else:
        behind_the_link(Path(sys.argv[2]), sys.argv[3])
