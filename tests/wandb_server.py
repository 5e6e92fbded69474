"""Stands in for W&B's server, as far as a run needs it to upload its history and to be resumed."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OWNER = {"id": "P", "name": "bigsgan", "entity": {"id": "E", "name": "tester"}}


class _Server(ThreadingHTTPServer):
    """Attributes: its address, and the history that was uploaded."""

    url: str
    rows: list[dict[str, Any]]


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        found: dict[str, Any] = {}
        if self.path.endswith("/graphql"):
            asked = json.loads(content)
            found = {"data": self._answer(asked["operationName"], asked["variables"])}
        elif self.path.endswith("/file_stream"):
            history = json.loads(content).get("files", {}).get("wandb-history.jsonl")
            if history:
                assert history["offset"] == len(self.server.rows)
                self.server.rows += map(json.loads, history["content"])
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_PUT = do_POST  # noqa: N815

    def _answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        rows = self.server.rows
        bucket = {"id": "B", "name": variables.get("name"), "displayName": "run", "config": "{}", "tags": []}
        if operation == "UpsertBucket":
            bucket |= {"description": "", "sweepName": None, "project": OWNER, "historyLineCount": len(rows)}
            return {"upsertBucket": {"bucket": bucket, "inserted": not rows}}
        if operation == "RunResumeStatus":
            bucket |= {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]"}
            bucket |= {"historyTail": json.dumps([json.dumps(row) for row in rows[-1:]])}
            bucket |= {"summaryMetrics": json.dumps(rows[-1] if rows else {}), "wandbConfig": '{"t": 1}'}
            return {"model": {**OWNER, "bucket": bucket if rows else None}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": self.server.url + "/file"} for name in variables["files"]]
            return {"createRunFiles": {"runID": "B", "uploadHeaders": [], "files": files}}
        return {}

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving() -> Iterator[_Server]:
    """Give a server with its ``url``, which stops after the block."""
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.rows, server.url = [], f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
