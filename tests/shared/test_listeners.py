"""The model proxy's Unix socket: who may open it, and what happens to its path."""

import socket
import stat
from pathlib import Path

import pytest

from shared.errors import ConfigurationError
from shared.http.listeners import unix_listeners
from shared.settings import ModelProxySettings, ServicesSettings, Settings


def settings_of(path: Path | None) -> Settings:
    proxy = ModelProxySettings(url="http://127.0.0.1:1", socket_path=path)
    return Settings(services=ServicesSettings(model_proxy=proxy))


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.connect(str(path))


def test_every_user_may_connect_as_long_as_it_is_open_and_then_the_path_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "models.sock"
    with unix_listeners("model_proxy", settings_of(path)) as listeners:
        assert len(listeners) == 1
        assert stat.S_IMODE(path.stat().st_mode) == 0o666
        connect(path)
    assert not path.exists()


def test_a_path_that_a_killed_process_left_behind_is_used_again(tmp_path: Path) -> None:
    path = tmp_path / "models.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with unix_listeners("model_proxy", settings_of(path)):
        connect(path)


def test_the_socket_of_a_successor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "models.sock"
    with unix_listeners("model_proxy", settings_of(path)):
        successor = unix_listeners("model_proxy", settings_of(path))
        successor.__enter__()
    connect(path)
    successor.__exit__(None, None, None)
    assert not path.exists()


@pytest.mark.parametrize("name", ["file.txt", "long" * 40, "file.txt/below"])
def test_a_path_that_no_socket_can_have_is_told_and_nothing_is_lost(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("mine")
    with (
        pytest.raises(ConfigurationError, match=r"services\.model_proxy\.socket_path: cannot listen on .*/\w"),
        unix_listeners("model_proxy", settings_of(tmp_path / name)),
    ):
        raise AssertionError("it listens")
    assert file.read_text() == "mine"


def test_other_services_and_no_path_mean_no_socket(tmp_path: Path) -> None:
    path = tmp_path / "models.sock"
    with (
        unix_listeners("agent", settings_of(path)) as of_agent,
        unix_listeners("model_proxy", settings_of(None)) as none,
    ):
        assert (of_agent, none) == ([], [])
    assert not path.exists()
