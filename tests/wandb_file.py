"""Reads the file of a W&B run, by the format of LevelDB's log and W&B's own messages: wandb 0.31 has no reader for it.

https://github.com/google/leveldb/blob/main/doc/log_format.md; the checksum is zlib's CRC-32 there, of type and data.
"""

import json
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b":W&B" + struct.pack("<HB", 0xBEE1, 0)
_BLOCK, _HEADER = 32_768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


class Segment(NamedTuple):
    """What one process wrote.

    Attributes:
        run_id: Of the W&B run.
        project, name: Of the same.
        config: Without W&B's own part.
        rows: The history, a dictionary a step, with ``_step``.
        metrics: Patterns of metric names, and the metric that each is drawn over.
        directory: With the files.
        alerts: Title and text of each message that W&B is to send.
        finished: Whether the run was ended, and not killed.
    """

    run_id: str
    project: str
    name: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    metrics: dict[str, str]
    directory: Path
    alerts: list[tuple[str, str]]
    finished: bool

    def series(self, name: str) -> list[tuple[int, Any]]:
        """A metric with its nimg."""
        return [(row["nimg"], row[name]) for row in self.rows if name in row]


def read_segments(out: Path) -> list[Segment]:
    """What the processes of a run directory wrote, in their order."""
    return [_read(path) for path in sorted(out.glob("wandb/offline-run-*/*.wandb"), key=lambda p: p.stat().st_mtime)]


def _read(path: Path) -> Segment:
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415  (it takes seconds, and ranks read no file)

    run, config, rows, metrics, alerts, finished = None, {}, [], {}, [], False
    for data in _records(path.read_bytes()):
        record = Record.FromString(data)
        match record.WhichOneof("record_type"):
            case "run":
                run = record.run
                config |= {item.key: json.loads(item.value_json) for item in run.config.update}
            case "config":
                config |= {item.key: json.loads(item.value_json) for item in record.config.update}
            case "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
                rows[-1].setdefault("_step", record.history.step.num)
            case "metric":
                metrics[record.metric.name or record.metric.glob_name] = record.metric.step_metric
            case "alert":
                alerts.append((record.alert.title, record.alert.text))
            case "exit":
                finished = True
    assert run is not None
    config.pop("_wandb", None)
    return Segment(run.run_id, run.project, run.display_name, config, rows, metrics, path.parent, alerts, finished)


def _records(content: bytes) -> Iterator[bytes]:
    """The records of a log; a torn one at its end is left out."""
    assert content.startswith(_MAGIC)
    at, record = len(_MAGIC), b""
    while at + _HEADER <= len(content):
        if _BLOCK - at % _BLOCK < _HEADER:  # too short for a header
            at += _BLOCK - at % _BLOCK
            continue
        checksum, length, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + _HEADER : at + _HEADER + length]
        if len(data) < length:
            return
        assert zlib.crc32(bytes([kind]) + data) == checksum
        record = data if kind in (_FULL, _FIRST) else record + data
        if kind in (_FULL, _LAST):
            yield record
        at += _HEADER + length
