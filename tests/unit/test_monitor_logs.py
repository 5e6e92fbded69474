import logging
import re
import socket

import pytest

from bigsgan.errors import UserError
from bigsgan.monitor import open_rank_log

LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) (\S+) rank (\d+) \[(.+?)\] ([A-Z]+) ([\w.]+): (.*)")


@pytest.fixture
def open_log(tmp_path):
    """Opens a rank log in tmp_path and closes it after the test; what it prints goes to the list that comes with it."""
    logs = []

    def build(rank: int):
        printed = []
        log = open_rank_log(tmp_path / "logs", rank, printed.append)
        logs.append(log)
        return log, printed

    yield build
    for log in logs:
        log.close()


def parsed(log):
    return [LINE.fullmatch(line).groups()[1:] for line in log.path.read_text(encoding="utf-8").splitlines()]


def test_lines_carry_host_rank_and_the_phase_of_their_time(open_log, tmp_path):
    log, _ = open_log(3)
    assert log.path == tmp_path / "logs" / "rank00003.log"
    logging.getLogger("bigsgan.engines").info("built %d parameters", 42)
    log.phase = "train"
    logging.getLogger("DeepSpeed").warning("slow")
    log.detail = lambda: "D trains: backward"
    logging.getLogger("bigsgan").info("step")
    logging.getLogger("bigsgan").debug("not kept")
    logging.getLogger("elsewhere").error("not ours")
    host = socket.gethostname()
    assert parsed(log) == [
        (host, "3", "start", "INFO", "bigsgan.engines", "built 42 parameters"),
        (host, "3", "train", "WARNING", "DeepSpeed", "slow"),
        (host, "3", "train, D trains: backward", "INFO", "bigsgan", "step"),
    ]


def test_rank_0_prints_the_warnings_of_bigsgan_through_the_current_write(open_log):
    log, printed = open_log(0)
    logging.getLogger("bigsgan").info("quiet")
    logging.getLogger("bigsgan.data").warning("a.png is corrupt")
    logging.getLogger("DeepSpeed").error("not printed again")
    assert printed == ["WARNING: a.png is corrupt"]
    above_the_bar = []
    log.write = above_the_bar.append
    logging.getLogger("bigsgan").error("disk full")
    assert (printed, above_the_bar) == (["WARNING: a.png is corrupt"], ["ERROR: disk full"])
    assert [line[3] for line in parsed(log)] == ["INFO", "WARNING", "ERROR", "ERROR"]


def test_other_ranks_print_nothing(open_log, capsys):
    log, printed = open_log(1)
    root = logging.StreamHandler()
    logging.getLogger().addHandler(root)  # as a library does that calls logging.warning
    try:
        logging.getLogger("bigsgan").warning("only in the file")
    finally:
        logging.getLogger().removeHandler(root)
    assert printed == []
    assert capsys.readouterr() == ("", "")
    assert len(parsed(log)) == 1


def test_a_resumed_run_appends_and_a_closed_log_gets_nothing_more(open_log):
    first, _ = open_log(0)
    logging.getLogger("bigsgan").info("before")
    first.close()
    assert logging.getLogger("bigsgan").propagate
    logging.getLogger("bigsgan").info("between")
    second, _ = open_log(0)
    logging.getLogger("bigsgan").info("after")
    assert [line[-1] for line in parsed(second)] == ["before", "after"]


def test_a_log_that_cannot_be_written_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_rank_log(tmp_path / "file" / "logs", 0, print)
