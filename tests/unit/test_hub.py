"""A folder goes to a Hub and back by huggingface_hub itself, and then comes out of its cache without a network."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import bigsgan
from bigsgan import cli
from bigsgan.errors import UserError
from bigsgan.inference import hub as hub_room
from tests import REPOSITORY
from tests.runs import make_run

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "user/name"

pytestmark = pytest.mark.slow
library = pytest.importorskip("huggingface_hub")


class Hub(BaseHTTPRequestHandler):
    """The requests of the Hub's public interface that an upload and a download make, for one repository."""

    protocol_version = "HTTP/1.1"
    files: dict[str, bytes]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self.answer({"url": f"http://{self.headers['Host']}/{NAME}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path == f"/api/models/{NAME}/preupload/main":
            listed = json.loads(body)["files"]
            self.answer(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in listed]}
            )
        elif path == f"/api/models/{NAME}/commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/{NAME}/commit/{COMMIT}"
            self.answer({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        else:
            self.answer({"error": f"unexpected {path}"}, status=404)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path in (f"/api/models/{NAME}/revision/main", f"/api/models/{NAME}"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer({"_id": "1", "id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in self.files.items()
            ]
            self.answer(listed)
        elif path.startswith(f"/{NAME}/resolve/") and name in self.files:
            content = self.files[name]
            self.answer(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})
        else:
            self.answer({"error": f"unexpected {path}"}, status=404)

    do_HEAD = do_GET  # noqa: N815 - the server's name

    def answer(self, content: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    """Address of an empty hub."""
    Hub.files = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


def python(tmp_path: Path, code: str, **environment: str) -> str:
    """Output of a process of its own, with a home and a cache in ``tmp_path``."""
    begin = "import bigsgan, torch; from safetensors.torch import save_file; torch.set_num_threads(1)\n"
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()
    }
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1", "HF_TOKEN": "hf_none"}
    variables = {**kept, **home, "PYTHONPATH": path, **environment}
    command = [sys.executable, "-c", begin + code]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported(directory: Path, *more: str) -> Path:
    """A folder for the Hub."""
    run, _ = make_run(directory)
    folder = directory / "folder"
    words = ["export", "--run", str(run), "--out", str(folder), "--format", "hub", "--batch", "25", *more]
    assert cli.main(words) == 0
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


SAVE = """
torch.manual_seed(0)
G = bigsgan.from_pretrained("user/name")
save_file({"images": G(torch.randn(3, 12), torch.arange(3)).detach().contiguous()}, FILE)
"""


def test_up_down_and_out_of_the_cache(hub, tmp_path):
    folder = exported(tmp_path)
    files = files_of(folder)
    (folder / "private.txt").write_text("not for others")
    # The Hub completes the first name.
    code = "for name in ('name', 'user/name'): print(bigsgan.push_to_hub('folder', name))"
    printed = python(tmp_path, code, HF_ENDPOINT=hub)
    assert printed.splitlines()[-2:] == 2 * [f"{hub}/{NAME}/commit/{COMMIT}"]
    assert Hub.files == files
    Hub.files["evil.py"] = b"raise SystemExit(1)"
    python(tmp_path, SAVE.replace("FILE", "'online'"), HF_ENDPOINT=hub)
    cached = sorted(path.name for path in (tmp_path / "home").rglob("snapshots/*/*"))
    assert cached == ["README.md", "config.json", "model.safetensors", "samples.png"]
    Hub.files.clear()
    python(tmp_path, SAVE.replace("FILE", "'offline'"), HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wanted = bigsgan.load(folder)(torch.randn(3, 12), torch.arange(3))
    for name in ("online", "offline"):
        assert torch.equal(load_file(tmp_path / name)["images"], wanted), name


CHANGE = """
from huggingface_hub import ModelHubMixin
G = bigsgan.PretrainedNetwork.from_pretrained("user/name", dtype="fp32")
assert isinstance(G, ModelHubMixin) and not G.training
G.save_pretrained("copy")
with torch.no_grad():
    for parameter in G.parameters():
        parameter.mul_(2)
print(G.push_to_hub("user/name", commit_message="twice"))
"""


def test_a_network_with_the_mixin(hub, tmp_path):
    folder, copy = exported(tmp_path, "--dtype", "bf16"), tmp_path / "copy"
    files = files_of(folder)
    Hub.files.update(files)
    printed = python(tmp_path, CHANGE, HF_ENDPOINT=hub)
    assert printed.splitlines()[-1] == f"{hub}/{NAME}/commit/{COMMIT}"
    assert Hub.files.keys() == files.keys() == {path.name for path in copy.iterdir()}
    for name in files.keys() - {"model.safetensors"}:
        assert (copy / name).read_bytes() == Hub.files[name] == files[name], name
    (tmp_path / "pushed").write_bytes(Hub.files["model.safetensors"])
    state, copied, pushed = (
        load_file(path) for path in (folder / "model.safetensors", copy / "model.safetensors", tmp_path / "pushed")
    )
    parameters = {name for name, _ in bigsgan.load(folder).network.named_parameters()}
    assert state.keys() == copied.keys() == pushed.keys()
    assert {state[name].dtype for name in parameters} == {torch.bfloat16}
    for name, tensor in state.items():
        wanted = 2 * tensor if name in parameters else tensor
        for found, value in ((copied[name], tensor), (pushed[name], wanted)):
            assert found.dtype == value.dtype, name
            assert torch.equal(found, value), name


def test_a_folder_is_not_overwritten(tmp_path):
    folder = exported(tmp_path, "--no-standing")
    files = files_of(folder)
    generator = bigsgan.PretrainedNetwork.from_pretrained(folder)
    with pytest.raises(UserError, match=r"^save_directory: must be a new directory, or one without these files, got "):
        generator.save_pretrained(folder)
    assert files_of(folder) == files


def test_what_is_not_there(hub, tmp_path):
    Hub.files["config.json"] = b"[]"
    code = """
for name in ("user/other", "no/repository/name", "user/name"):
    try:
        bigsgan.from_pretrained(name)
    except bigsgan.errors.UserError as error:
        print(error)
"""
    for offline in ("0", "1"):
        lines = python(tmp_path, code, HF_ENDPOINT=hub, HF_HUB_OFFLINE=offline).splitlines()[-3:]
        for line, name in zip(lines, ("user/other", "no/repository/name"), strict=False):
            assert line.startswith(f"from_pretrained: '{name}' cannot be downloaded: ")
            assert line.endswith("; give a folder, or a repository that you can read")


def test_a_hub_that_cannot_be_reached(tmp_path, monkeypatch):
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        api = functools.partial(library.HfApi, endpoint=f"http://127.0.0.1:{closed.getsockname()[1]}")
        monkeypatch.setattr(library, "HfApi", api)
        monkeypatch.setattr(hub_room, "load", lambda folder: None)
        with pytest.raises(UserError, match=r"^push_to_hub: 'digits' cannot be uploaded to: .*refused.*; see that the"):
            bigsgan.push_to_hub(tmp_path, "digits", token="hf_none")
