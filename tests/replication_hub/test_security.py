"""TLS, mutual TLS, and what is refused without them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from lease_core import LeaseQueue, WorkItem
from lease_core.cli import main
from lease_core.errors import InvalidConfig, InvalidInput, StoreUnavailable
from lease_core.replication import Batch, HubServer, HubSink, Relay, SinkUnavailable, each_event, follow_hub, read_hub
from tests.replication_hub.batches import events


class Certificates:
    """An authority of our own, and what it signed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = trustme.CA()
        self.ca = folder / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, common_name: str | None = None) -> dict[str, Any]:
        made = self._authority.issue_cert(*names, common_name=common_name)
        stem = self._folder / (common_name or names[0])
        made.private_key_pem.write_to_path(f"{stem}.key")
        for index, pem in enumerate(made.cert_chain_pems):
            pem.write_to_path(f"{stem}.pem", append=index > 0)
        return {"certificate": f"{stem}.pem", "key": f"{stem}.key"}

    def of(self, *names: str, common_name: str | None = None) -> dict[str, Any]:
        """The arguments of a client with such a certificate."""
        return {"ca": self.ca, **self.issue(*names, common_name=common_name)}


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


@pytest.fixture
def mutual(certificates: Certificates, tmp_path: Path) -> Iterator[str]:
    shown = certificates.issue("localhost")
    url = f"sqlite:///{tmp_path}/hub.db"
    with HubServer(url, "127.0.0.1:0", client_ca=certificates.ca, **shown) as server:
        yield f"localhost:{server.port}"


def test_with_mutual_tls_the_source_is_who_its_certificate_says(mutual: str, certificates: Certificates) -> None:
    eu, us = certificates.of("eu.example", common_name="eu"), certificates.of("us.example")
    HubSink(mutual, **eu).deliver(Batch(events(1, 5)))
    HubSink(mutual, source="eu.example", **eu).deliver(Batch(events(1, 6)))
    HubSink(mutual, **us).deliver(Batch(events(1, 7)))
    found = follow_hub(mutual, **us).sources()
    assert [(each.source, each.last) for each in found] == [("eu", 5), ("eu.example", 6), ("us.example", 7)]
    assert list(each_event(read_hub(mutual, "eu", "n", **us))) == events(1, 5)


def test_a_source_that_claims_to_be_another_is_refused(mutual: str, certificates: Certificates) -> None:
    HubSink(mutual, **certificates.of("eu")).deliver(Batch(events(1, 5)))
    thief = HubSink(mutual, source="eu", **certificates.of("us"))
    with pytest.raises(SinkUnavailable, match=r"PERMISSION_DENIED.*the certificate is of us, not of eu"):
        thief.deliver(Batch(events(6, 9)))
    with pytest.raises(SinkUnavailable, match="PERMISSION_DENIED"):
        thief.position("n")
    assert len(list(each_event(read_hub(mutual, "eu", "n", **certificates.of("us"))))) == 5


def test_a_cursor_belongs_to_the_certificate_that_keeps_it(mutual: str, certificates: Certificates) -> None:
    eu, us = certificates.of("eu"), certificates.of("us")
    HubSink(mutual, **eu).deliver(Batch(events(1, 5)))
    follow_hub(mutual, "dashboard", **eu).keep(3)
    assert len(list(follow_hub(mutual, "dashboard", **eu).events(once=True))) == 2
    assert len(list(follow_hub(mutual, "dashboard", **us).events(once=True))) == 5


def test_without_a_certificate_of_the_right_authority_nothing_works(
    mutual: str, certificates: Certificates, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    foreign = Certificates(elsewhere).issue("eu")
    for given in ({"ca": certificates.ca}, {"ca": certificates.ca, **foreign}, {"insecure": True}):
        with pytest.raises(SinkUnavailable):
            HubSink(mutual, source="eu", timeout=10, **given).deliver(Batch(events(1, 5)))
        with pytest.raises(StoreUnavailable):
            read_hub(mutual, "eu", "n", **given).events(0, 1)


def test_a_client_refuses_a_hub_that_it_cannot_check(certificates: Certificates, mutual: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Certificates(tmp_path / "other")
    with pytest.raises(SinkUnavailable):
        HubSink(mutual, timeout=10, **{**certificates.of("eu"), "ca": other.ca}).deliver(Batch(events(1, 1)))
    by_number = mutual.replace("localhost", "127.0.0.1")
    with pytest.raises(SinkUnavailable):
        HubSink(by_number, timeout=10, **certificates.of("eu")).deliver(Batch(events(1, 1)))
    HubSink(by_number, server_name="localhost", **certificates.of("eu")).deliver(Batch(events(1, 1)))


def test_tls_alone_hides_what_is_sent_and_leaves_the_source_to_say_its_name(
    certificates: Certificates, tmp_path: Path
) -> None:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", **certificates.issue("localhost")) as hub:
        address = f"localhost:{hub.port}"
        HubSink(address, source="a", ca=certificates.ca).deliver(Batch(events(1, 5)))
        assert len(read_hub(address, "a", "n", ca=certificates.ca).events(0, 10)) == 5
        with pytest.raises(SinkUnavailable, match="source: say which"):
            HubSink(address, ca=certificates.ca).deliver(Batch(events(1, 5)))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "hub.example:0"])
def test_without_tls_the_hub_listens_to_this_machine_only(listen: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="listen"):
        HubServer(f"sqlite:///{tmp_path}/hub.db", listen)


def test_it_can_be_told_to_listen_to_anybody(tmp_path: Path) -> None:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "0.0.0.0:0", insecure=True) as hub:
        HubSink(f"127.0.0.1:{hub.port}", source="a").deliver(Batch(events(1, 5)))


def test_settings_that_contradict_each_other_are_named(certificates: Certificates, tmp_path: Path) -> None:
    url, pair = f"sqlite:///{tmp_path}/hub.db", certificates.issue("localhost")
    for given, field in (
        ({"client_ca": certificates.ca}, "client_ca"),
        ({"certificate": pair["certificate"]}, "key"),
        ({"key": pair["key"]}, "certificate"),
        ({**pair, "insecure": True}, "insecure"),
        ({**pair, "client_ca": tmp_path / "nowhere.pem"}, "client_ca"),
    ):
        with pytest.raises(InvalidConfig, match=f"^{field}"):
            HubServer(url, **given)
    with pytest.raises(InvalidConfig, match="insecure"):
        HubSink("hub.example:1", ca=certificates.ca, insecure=True)
    with pytest.raises(InvalidInput, match="address"):
        HubSink("hub.example")
    with pytest.raises(InvalidInput, match="url"):
        HubServer("sqlite://").start()


def test_a_file_that_is_no_certificate_or_key_is_named(certificates: Certificates, tmp_path: Path) -> None:
    """Of what gRPC cannot use it says only that it cannot listen, or that nobody answers."""
    good, other = certificates.issue("localhost"), certificates.issue("other")
    (tmp_path / "bad").write_text("no PEM at all")
    bad = tmp_path / "bad"
    for given, field in (
        ({**good, "certificate": bad}, "certificate: .*holds no certificate"),
        ({**good, "certificate": good["key"]}, "certificate: .*holds no certificate"),
        ({**good, "key": bad}, "key: .*is not the key of"),
        ({**good, "key": other["key"]}, "key: .*is not the key of"),
    ):
        with pytest.raises(InvalidConfig, match=field):
            HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", **given)
        with pytest.raises(InvalidConfig, match=field):
            read_hub("localhost:1", "eu", ca=certificates.ca, **given)
    with pytest.raises(InvalidConfig, match=r"client_ca: .*holds no certificate"):
        HubServer(f"sqlite:///{tmp_path}/hub.db", "127.0.0.1:0", client_ca=bad, **good)
    with pytest.raises(InvalidConfig, match=r"ca: .*holds no certificate"):
        read_hub("localhost:1", "eu", ca=bad)


def test_a_secured_hub_is_read_by_an_address(
    mutual: str, certificates: Certificates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eu = certificates.of("eu.example", common_name="a+b")
    with LeaseQueue.open(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.enqueue([WorkItem("file", "a"), WorkItem("file", "b")])
        with Relay(queue, HubSink(mutual, **eu)) as relay:
            assert relay.wait_until(2, 60)
    address = f"hub:{mutual}/a%2Bb?" + "&".join(f"{name}={path}" for name, path in eu.items())
    assert main(["verify", address, "--against", f"sqlite:///{tmp_path}/queue.db"]) == 0
    assert main(["rebuild", address, f"sqlite:///{tmp_path}/rebuilt.db"]) == 0
    assert "event 2: 2 pending" in capsys.readouterr().out
    assert main(["verify", address.partition("&")[0]]) == 2  # without the certificate
    by_number = address.replace("localhost", "127.0.0.1")
    assert main(["verify", f"{by_number}&server_name=localhost"]) == 0


def test_a_hub_without_tls_elsewhere_is_read_if_told(tmp_path: Path) -> None:
    with HubServer(f"sqlite:///{tmp_path}/hub.db", "0.0.0.0:0", insecure=True) as hub:
        HubSink(f"127.0.0.1:{hub.port}", source="eu").deliver(Batch(events(1, 5)))
        elsewhere = f"hub:0.0.0.0:{hub.port}/eu"
        arguments = ["--namespace", "n", "--after", "1"]
        assert main(["verify", f"{elsewhere}?insecure=true", *arguments]) == 0
        assert main(["verify", elsewhere, *arguments]) == 2
