"""The proxy does to a connection what its mode says."""

import socket
import threading
import time

import pytest

from tests.chaos.proxy import Mode, Proxy


@pytest.fixture
def proxy():
    """Before a server that answers each line with the same line."""

    def answer(connection):
        with connection:
            while data := connection.recv(1000):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        with Proxy(listening.getsockname()[1]) as proxy:
            yield proxy
        listening.shutdown(socket.SHUT_RDWR)


def connect(proxy):
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=1.0)


def ask(connection, text=b"hello"):
    """The answer; empty where the connection has ended, None where none comes."""
    try:
        connection.sendall(text)
        return connection.recv(1000)
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


def test_it_passes_bytes_on(proxy):
    with connect(proxy) as connection:
        assert ask(connection) == b"hello"


@pytest.mark.parametrize("mode", [Mode.HOLE, Mode.OLD_HOLE, Mode.ONE_WAY])
def test_a_hole_swallows_and_closes_nothing(proxy, mode):
    with connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.mode = mode
        assert ask(old) is None
        with connect(proxy) as new:
            assert ask(new) == (b"hello" if mode is Mode.OLD_HOLE else None)


def test_a_reset_ends_old_and_new_connections(proxy):
    with connect(proxy) as old:
        assert ask(old) == b"hello"
        proxy.mode = Mode.RESET
        assert ask(old) == b""
        with connect(proxy) as new:
            assert ask(new) == b""


def test_the_next_request_is_cut_before_its_reply(proxy):
    with connect(proxy) as connection:
        proxy.mode = Mode.CUT_AFTER_REQUEST
        assert ask(connection) == b""
    with connect(proxy) as connection:
        assert ask(connection) == b"hello"


def test_half_of_a_reply_comes_and_then_the_end(proxy):
    with connect(proxy) as connection:
        proxy.mode = Mode.CUT_IN_REPLY
        assert ask(connection) == b"he"
        assert ask(connection) == b""


def test_a_slow_line_and_a_delay_take_their_time(proxy):
    with connect(proxy) as connection:
        for mode, at_least_s in ((Mode.DELAY, 0.4), (Mode.SLOW, 0.2)):
            proxy.mode = mode
            began = time.monotonic()
            assert ask(connection, b"x" * 100) == b"x" * 100
            assert time.monotonic() - began >= at_least_s - 0.05
