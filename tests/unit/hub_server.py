"""A model hub for tests. The hub answers HTTP requests for the files of a model. The clients of
Hugging Face and ModelScope send these requests.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

MODELSCOPE = "/api/v1/models/"
TOKEN = "secret"  # clients need this token for models of the owner "private"


@dataclass
class Hub:
    """A hub whose models each have one commit.

    Attributes:
        files: for each model, the contents of its files by path.
        loaded: paths of the files that clients have requested, in the order of the requests.
    """

    files: dict[str, dict[str, bytes]]
    address: str = ""
    loaded: list[str] = field(default_factory=list)

    def commit(self, model: str) -> str:
        return hashlib.sha1(model.encode()).hexdigest()


@contextmanager
def running(hub: Hub) -> Iterator[Hub]:
    """Serve requests at ``hub.address`` inside this context."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            if self.path.startswith(MODELSCOPE):
                return self._answer_as_modelscope(has_body=has_body)
            path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
            if path.count("/") < 3:
                return self._send(404, b"", {}, has_body=has_body)
            maker, name, kind, revision, *rest = path.split("/")
            model = f"{maker}/{name}"
            is_free = maker != "private" or self.headers.get("Authorization") == f"Bearer {TOKEN}"
            if not is_free:
                return self._send(401, b"{}", {"X-Error-Code": "GatedRepo"}, has_body=has_body)
            if (files := hub.files.get(model)) is None:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"}, has_body=has_body)
            commit = hub.commit(model)
            if revision not in ("main", "v1", commit):
                error = {"X-Error-Code": "RevisionNotFound"}
                return self._send(404, b"{}", error, has_body=has_body)
            if kind == "revision":
                siblings = [{"rfilename": path} for path in files]
                info = {"id": model, "sha": commit, "siblings": siblings, "tags": []}
                return self._send(200, json.dumps(info).encode(), {}, has_body=has_body)
            if kind == "tree":
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": _oid(data)}
                    for path, data in files.items()
                ]
                return self._send(200, json.dumps(tree).encode(), {}, has_body=has_body)
            data = files["/".join(rest)]
            if has_body:
                hub.loaded.append("/".join(rest))
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(data)}"'}
            self._send(200, data, headers, has_body=has_body)

        def _answer_as_modelscope(self, *, has_body: bool) -> None:
            path, _, query = self.path.removeprefix(MODELSCOPE).partition("?")
            asked = dict(parse_qsl(query))
            model, _, kind = path.partition("/repo")
            is_free = not model.startswith("private/") or f"={TOKEN}" in self.headers["Cookie"]
            files = hub.files.get(model, {}) if is_free else {}
            if not files or asked["Revision"] not in ("master", "v1"):
                return self._send(404, b"{}", {}, has_body=has_body)
            if kind == "/files":
                listed = [
                    {"Path": path, "Type": "blob", "Size": len(data), "Sha256": _sha256(data)}
                    for path, data in files.items()
                ]
                body = json.dumps({"Code": 200, "Success": True, "Data": {"Files": listed}})
                return self._send(200, body.encode(), {}, has_body=has_body)
            hub.loaded.append(asked["FilePath"])
            self._send(200, files[asked["FilePath"]], {}, has_body=has_body)

        def _send(
            self, status: int, body: bytes, headers: dict[str, str], *, has_body: bool
        ) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
