"""A server on this machine that speaks the part of the Hub's HTTP API that huggingface_hub and datasets use.

Small files are sent as they are, .safetensors from another host name ("the CDN") after a redirect; both with ETag and
Range. Commits are those of the real protocol: base64 in newline-delimited JSON, large files by LFS.
"""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_WritesToTheServerOfTheTests"


class Repository:
    """Commits by hash, each the content of files by name; `refs` name some of them."""

    def __init__(self, files: dict[str, bytes] | None = None, *, gated=False, private=False):
        self.commits, self.refs, self.gated, self.private = {}, {}, gated, private
        self.commit(files or {})

    def commit(self, files: dict[str, bytes]) -> str:
        sha = hashlib.sha1(repr((len(self.commits), sorted(files.items()))).encode()).hexdigest()
        self.commits[sha], self.refs["main"] = files, sha
        return sha


class Request(NamedTuple):
    path: str
    headers: dict[str, str]


class Hub(ThreadingHTTPServer):
    """`models` and `data` by name; `requests` so far; `cut`: names of files whose next transfer breaks off half-way."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.data, self.blobs = {}, {}, {}
        self.requests, self.cut = [], set()
        self.url, self.cdn = (f"http://{host}:{self.server_port}" for host in ("127.0.0.1", "localhost"))

    def handle_error(self, request, client_address):
        pass  # a client that left


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()  # returns when the loop has ended
        hub.server_close()


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(Request(path, {k.lower(): v for k, v in self.headers.items()}))
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        for pattern, answer in _ROUTES.items():
            if match := re.fullmatch(pattern, path):
                return answer(self, *match.groups())
        self._error(404, "EntryNotFound", "Entry not found")

    do_HEAD = do_POST = do_PUT = do_GET

    def _send(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, sent: int | None = None):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None:
            self.close_connection = True

    def _json(self, value, status=200):
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _error(self, status: int, code: str, message: str):
        self._send(status, message.encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def _is_writer(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            return True
        self._error(401, "Unauthorized", "Invalid credentials")
        return False

    def _commit(self, kind, name, revision) -> tuple[Repository, str] | None:
        """A repository and a commit of it; None where an error was sent."""
        repo = (self.server.data if kind and kind.startswith("datasets") else self.server.models).get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not allowed):
            return self._error(404 if allowed else 401, "RepoNotFound", "Repository not found")
        if repo.gated and not allowed and "/resolve/" in self.path:
            return self._error(403, "GatedRepo", f"Access to model {name} is restricted")
        sha = repo.refs.get(revision or "main", revision)
        return (repo, sha) if sha in repo.commits else self._error(404, "RevisionNotFound", "Revision not found")

    # --- reading ---

    def info(self, kind, name, revision=None):
        if commit := self._commit(kind, name, revision):
            repository, sha = commit
            files = [{"rfilename": path} for path in sorted(repository.commits[sha])]
            known = {"id": name, "sha": sha, "private": repository.private, "gated": repository.gated, "tags": []}
            self._json(known | {"siblings": files, "downloads": 0, "likes": 0})

    def tree(self, kind, name, revision, folder=None):
        if commit := self._commit(kind, name, revision):
            files = commit[0].commits[commit[1]]
            self._json([_entry(path, files[path]) for path in sorted(files) if path.startswith(folder or "")])

    def paths(self, kind, name, revision):
        if commit := self._commit(kind, name, revision):
            files, wanted = commit[0].commits[commit[1]], json.loads(self._body)["paths"]
            self._json([_entry(path, files[path]) for path in wanted if path in files])

    def file(self, kind, name, revision, path):
        if not (commit := self._commit(kind, name, revision)):
            return
        content = commit[0].commits[commit[1]].get(path)
        if content is None:
            return self._error(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit[1], "ETag": f'"{_entry(path, content)["oid"]}"'}
        if not is_large(path):
            return self._content(path, content, headers)
        sha = hashlib.sha256(content).hexdigest()
        self.server.blobs[sha] = content
        headers |= {"X-Linked-Etag": f'"{sha}"', "X-Linked-Size": str(len(content))}
        self._send(302, b"", {**headers, "Location": f"{self.server.cdn}/cdn/{sha}/{path}"})

    def blob(self, sha, path):
        self._content(path, self.server.blobs[sha], {"ETag": f'"{sha}"'})

    def _content(self, path, content, headers):
        headers = {**headers, "Accept-Ranges": "bytes"}
        status, rest = 200, content
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
            if first >= len(content):
                return self._send(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            status, rest = 206, content[first : last + 1]
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        broken = self.command == "GET" and path in self.server.cut
        self.server.cut -= {path} if broken else set()
        self._send(status, rest, headers, sent=len(rest) // 2 if broken else None)

    # --- writing ---

    def create(self):
        if self._is_writer():
            body = json.loads(self._body)
            name = f"{body['organization']}/{body['name']}"
            exists = name in self.server.models
            private = body.get("private") or body.get("visibility") == "private"
            self.server.models.setdefault(name, Repository(private=bool(private)))
            self._json({"url": f"{self.server.url}/{name}", "id": name}, 409 if exists else 200)

    def validate(self):
        text = json.loads(self._body)["content"]
        try:
            valid = isinstance(yaml.safe_load(text.split("---\n")[1]), dict)
        except (yaml.YAMLError, IndexError):
            valid = False
        errors = [] if valid else [{"message": "metadata is no YAML"}]
        self._json({"errors": errors, "warnings": []}, 200 if valid else 400)

    def preupload(self, name, revision):
        if self._is_writer() and self._commit(None, name, revision):
            files = json.loads(self._body)["files"]
            modes = [(file["path"], "lfs" if is_large(file["path"]) else "regular") for file in files]
            self._json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False, "oid": None} for p, m in modes]})

    def batch(self, name):
        if self._is_writer():
            objects = json.loads(self._body)["objects"]
            actions = [{"upload": {"href": f"{self.server.cdn}/put/{one['oid']}"}} for one in objects]
            answers = [{**one, "actions": action} for one, action in zip(objects, actions, strict=True)]
            self._json({"transfer": "basic", "objects": answers})

    def put(self, sha):
        assert hashlib.sha256(self._body).hexdigest() == sha
        self.server.blobs[sha] = self._body
        self._send(200)

    def commit(self, name, revision):
        if self._is_writer() and (head := self._commit(None, name, revision)):
            repository, files = head[0], dict(head[0].commits[head[1]])
            for line in map(json.loads, self._body.decode().splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.server.blobs[value["oid"]]
            sha = repository.commit(files)
            self._json({"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"})


_N, _R = r"([\w.-]+/[\w.-]+)", r"([\w.-]+)"
_ROUTES = {
    r"/api/repos/create": _Handler.create,
    r"/api/validate-yaml": _Handler.validate,
    rf"/api/(models|datasets)/{_N}": _Handler.info,
    rf"/api/(models|datasets)/{_N}/revision/{_R}": _Handler.info,
    rf"/api/(models|datasets)/{_N}/tree/{_R}(?:/(.*))?": _Handler.tree,
    rf"/api/(models|datasets)/{_N}/paths-info/{_R}": _Handler.paths,
    rf"/api/models/{_N}/preupload/{_R}": _Handler.preupload,
    rf"/api/models/{_N}/commit/{_R}": _Handler.commit,
    rf"/{_N}\.git/info/lfs/objects/batch": _Handler.batch,
    rf"/(datasets/)?{_N}/resolve/{_R}/(.*)": _Handler.file,
    r"/cdn/(\w+)/(.*)": _Handler.blob,
    r"/put/(\w+)": _Handler.put,
}


def _entry(path: str, content: bytes) -> dict:
    """As `tree` and `paths-info` describe a file; its oid is Git's hash."""
    oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    entry = {"type": "file", "path": path, "size": len(content), "oid": oid}
    if is_large(path):
        entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
    return entry
