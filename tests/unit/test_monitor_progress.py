import fcntl
import io
import os
import pty
import re
import select
import struct
import termios
from contextlib import closing

import pytest

from bigsgan.monitor.progress import Progress

LOSSES = {"loss/generator": 0.1234, "loss/discriminator": 1.8349, "logits/real": 7.0}


class Terminal:
    """A pseudo-terminal: the end that a program writes to, and the text that it would show."""

    def __init__(self, rows: int, columns: int) -> None:
        self._shown, program = pty.openpty()
        fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.stream = os.fdopen(program, "w", encoding="utf-8")

    def read(self, until: str) -> str:
        """The text since the last call, as far as the pattern ``until``, which must come within seconds."""
        text = b""
        while not (found := re.search(until + r"\Z", text.decode(errors="ignore").replace("\r\n", "\n"), re.DOTALL)):
            assert select.select([self._shown], [], [], 5.0)[0], f"{until!r} does not end {text!r}"
            text += os.read(self._shown, 100_000)
        return found.string

    def close(self) -> None:
        self.stream.close()
        os.close(self._shown)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands at clock[0] seconds."""
    now = [100.0]
    monkeypatch.setattr("bigsgan.monitor.progress.monotonic", lambda: now[0])
    return now


def test_a_log_file_gets_one_plain_line_a_report(clock):
    stream = io.StringIO()
    progress = Progress(total_nimg=45056, initial_nimg=0, stream=stream)
    clock[0] += 20.0
    progress.update(8192, LOSSES)
    clock[0] += 5.0
    progress.update(9216, {"loss/generator": float("nan")})
    progress.close()
    # 20 s for 8192 images: 409.6 a second, and (45056 - 8192) / 409.6 = 90 s are left. Then 1024 images in 5 s, and at
    # the mean speed of 9216 in 25 s (45056 - 9216) / 368.64 = 97.2 s are left.
    assert stream.getvalue() == (
        "nimg 8192/45056  G 0.12  D 1.83  409.6 images/s  01:30 left\n"
        "nimg 9216/45056  G nan  204.8 images/s  01:37 left\n"
    )


def test_a_terminal_gets_one_bar_that_is_drawn_anew(clock):
    with closing(Terminal(30, 120)) as terminal:
        progress = Progress(total_nimg=1000, initial_nimg=250, stream=terminal.stream)
        clock[0] += 5.0
        progress.update(500, LOSSES)
        drawn = terminal.read(until="left")
        assert drawn.split("\r")[-1].startswith(" 50%|")
        assert drawn.endswith("| nimg 500/1000  G 0.12  D 1.83  50.0 images/s  00:10 left")
        clock[0] += 5.0
        progress.update(1024, LOSSES)
        redrawn = terminal.read(until="left")
        assert redrawn.split("\r")[-1].startswith("100%|")
        assert "\n" not in drawn + redrawn
        progress.close()
        assert terminal.read(until="\n").count("\n") == 1


@pytest.mark.parametrize("columns", [70, 78, 79, 80, 120])
def test_the_end_of_a_bar_is_not_cut_off(columns, clock):
    with closing(Terminal(30, columns)) as terminal:
        progress = Progress(total_nimg=25_000_000, initial_nimg=0, stream=terminal.stream)
        clock[0] += 12_345.0
        progress.update(12_345_678, LOSSES)
        drawn = terminal.read(until="left").split("\r")[-1]
        assert len(drawn) < columns
        rate = "  1000.1 images/s" * (columns >= 79)
        assert drawn.endswith(f"| nimg 12345678/25000000  G 0.12  D 1.83{rate}  3:30:53 left")
        progress.close()


def test_a_message_stands_on_its_own_line_above_the_bar():
    with closing(Terminal(30, 80)) as terminal:
        progress = Progress(total_nimg=1000, initial_nimg=500, stream=terminal.stream)
        progress.write("saved checkpoint")
        cleared, redrawn = terminal.read(until=r"saved checkpoint\n.*%.*\| ").split("saved checkpoint\n")
        assert cleared.split("\r")[-2].strip() == ""  # the bar was wiped out first
        assert redrawn.lstrip("\r").startswith(" 50%|")
        progress.close()


def test_a_terminal_without_a_size_gets_plain_lines(clock):
    with closing(Terminal(0, 0)) as terminal:
        progress = Progress(total_nimg=1000, initial_nimg=0, stream=terminal.stream)
        progress.update(0, LOSSES)
        assert terminal.read(until="\n") == "nimg 0/1000  G 0.12  D 1.83\n"
