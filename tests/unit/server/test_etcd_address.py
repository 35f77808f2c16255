"""Values of `--state` that name an etcd cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_server.settings import ServerSettings, state_settings
from paceline_server.storage.etcd_address import EtcdAddress


def test_a_state_path_selects_a_state_file() -> None:
    assert state_settings(None) == {}
    assert state_settings("state.db") == {"state_path": Path("state.db")}


def test_parse_reads_nodes_prefix_and_tls_files() -> None:
    assert EtcdAddress.parse("etcd://a:2379,b:2379/x/y") == EtcdAddress(("a:2379", "b:2379"), "x/y")
    found = EtcdAddress.parse("etcd://a:2379/x?ca=/ca.pem&cert=c.pem&key=c.key")
    assert (found.ca, found.cert, found.key) == (Path("/ca.pem"), Path("c.pem"), Path("c.key"))
    assert str(found) == "etcd://a:2379/x"


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ("etcd://a:2379", "the prefix is missing"),
        ("etcd://a:2379/", "the prefix is missing"),
        ("etcd://a/x", "is not host:port"),
        ("etcd:///x", "is not host:port"),
        ("etcd:a:2379/x", "is not host:port"),
        ("etcd://a:0/x", "is not host:port"),
        ("etcd://a:2379/x?user=me", "the files of TLS"),
        ("etcd://a:2379/x?ca=", "the files of TLS"),
        ("etcd://a:2379/x?cert=c", "needs its key"),
        ("etcd://a:2379/x?cert=c&key=k", "and the authority"),
    ],
)
def test_a_malformed_address_raises_value_error(state: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        EtcdAddress.parse(state)


def test_a_password_is_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="passwords are not supported") as refused:
        EtcdAddress.parse("etcd://me:hunter2@a:2379/x")
    assert "hunter2" not in str(refused.value)


def test_a_key_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text("x")
        (tmp_path / name).chmod(0o644)
    address = EtcdAddress.parse(f"etcd://a:1/x?ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key")
    with pytest.raises(ValueError, match="key"):
        address.read_files()


@pytest.mark.parametrize("empty", ["cert", "key"])
def test_an_empty_tls_file_is_refused(tmp_path: Path, empty: str) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text("" if name == empty else "x")
    address = EtcdAddress.parse(f"etcd://a:1/x?ca={tmp_path}/ca&cert={tmp_path}/cert&key={tmp_path}/key")
    with pytest.raises(ValueError, match="is empty"):
        address.read_files()


def test_state_path_and_etcd_together_are_refused() -> None:
    with pytest.raises(ValueError, match="not in both"):
        ServerSettings(state_path=Path("s.db"), etcd=EtcdAddress(("a:1",), "x"))


def test_reached_at_is_the_advertise_address_or_the_listen_address() -> None:
    assert ServerSettings(listen="127.0.0.1:1").reached_at == "127.0.0.1:1"
    assert ServerSettings(listen="0.0.0.0:1", advertise="a:2").reached_at == "a:2"
    assert ServerSettings(listen="0.0.0.0:1").reached_at.endswith(":1")
    assert not ServerSettings(listen="[::]:1").reached_at.startswith("[")
