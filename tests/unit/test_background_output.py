"""Output that nobody reads never makes its process wait, and what is left out is counted."""

import logging
import os
import threading

import pytest

from quantdrift.core.output import BackgroundOutput

pytestmark = pytest.mark.unit


@pytest.fixture
def pipe() -> "list[int]":
    """Return the reading and the writing end of a pipe."""
    return list(os.pipe())


def test_what_is_written_arrives_in_order(pipe: list[int]) -> None:
    """A pipe that is read gets every line."""
    reader, writer = pipe
    output = BackgroundOutput(writer)
    for number in range(100):
        output.write(f"{number}\n")
    assert output.drain(30)
    assert os.read(reader, 1 << 16).split() == [b"%d" % number for number in range(100)]


def test_a_pipe_that_nobody_reads_holds_nobody_up(pipe: list[int]) -> None:
    """The rest is left out, and counted where it would be once somebody reads again."""
    reader, writer = pipe
    output = BackgroundOutput(writer, most_bytes=1000)
    line = "x" * 99 + "\n"
    n = 0
    while output.drain(0.01):  # until the pipe is full
        output.write(line)
        n += 1
    for _ in range(50):
        output.write(line)
    read = b""
    while b"left out" not in read:
        read += os.read(reader, 1 << 16)
    assert b"%d lines were left out here" % (n + 50 - read.count(line.encode())) in read


def test_a_pipe_that_is_closed_ends_nothing(pipe: list[int]) -> None:
    """As in `quantdrift up | head`."""
    reader, writer = pipe
    os.close(reader)
    output = BackgroundOutput(writer)
    output.write("nobody\n")
    assert output.drain(30)


def test_a_logger_of_many_threads_loses_no_line(pipe: list[int]) -> None:
    """Lines stay whole."""
    reader, writer = pipe
    output = BackgroundOutput(writer)
    handler = logging.StreamHandler(output)
    logger = logging.getLogger("t")
    logger.addHandler(handler)

    def log() -> None:
        for _ in range(200):
            logger.warning("line of a thread")

    threads = [threading.Thread(target=log) for _ in range(4)]
    read = b""
    for thread in threads:
        thread.start()
    while read.count(b"\n") < 800:
        read += os.read(reader, 1 << 16)
    for thread in threads:
        thread.join()
    assert set(read.splitlines()) == {b"line of a thread"}
