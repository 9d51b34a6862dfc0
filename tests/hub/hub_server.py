# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""A Hub on the loopback interface, for tests without a network.

It is our reading of the API, taken from the requests that huggingface_hub sends with Xet switched off
(`HF_HUB_DISABLE_XET=1`): create, branches, preupload, LFS batch, upload and verify, commit, tree, info, and resolve
with ETag and Range. It knows no more than these tests need, and proves nothing about what the real Hub would answer.

Everything lies in memory. `POST /__faults__`, which is no route of the Hub, lets a test break the next requests.
"""

import base64
import hashlib
import json
import re
import threading
import traceback
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".png")  # as .gitattributes of a new repository has them
REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class User:
    name: str
    organisations: tuple[str, ...] = ()
    may_write: bool = True


@dataclass
class Repo:
    private: bool
    commits: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)  # commit -> path -> (kind, digest)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, files: dict[str, tuple[str, str]], message: str) -> str:
        self.messages.append(message)
        oid = hashlib.sha1(f"{len(self.messages)}{branch}{sorted(files.items())}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        return oid


@dataclass
class Fault:
    """What happens to the next `times` requests of a method whose path matches, after `skip` that pass."""

    method: str
    path: str
    times: int = 1
    skip: int = 0
    status: int = 0  # answer with it; 0 hangs until the client goes away
    headers: dict[str, str] = field(default_factory=dict)


class HubServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, users: dict[str, User]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.users = users  # token -> user
        self.repos: dict[str, Repo] = {}
        self.blobs: dict[str, bytes] = {}  # SHA-1 of git blobs and SHA-256 of LFS objects -> content
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers, of all answered
        self.faults: list[Fault] = []
        self.errors: list[str] = []  # of this server itself
        self.url = f"http://127.0.0.1:{self.server_port}"
        # Large files lie on another host, to which huggingface_hub sends no token.
        self.storage_url = f"http://localhost:{self.server_port}"
        self.hanging = threading.Event()
        self.released = threading.Event()

    def handle_error(self, *_):
        """A client that was killed is no error of the server."""

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.released.set()
        self.shutdown()
        self.server_close()


class Answer(Exception):
    """An answer other than 200, from anywhere in a route."""

    def __init__(self, status: int, code: str = "", message: str = "", url: str = "", **headers: str):
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}
        if code:
            self.headers["X-Error-Code"] = code
        self.body = {"error": message or code, "url": url}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self):
        parts = urlsplit(self.path)
        self.route, self.query = unquote(parts.path), parse_qs(parts.query)
        try:
            self.break_if_asked()
            self.body = self.read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.server.requests.append((self.command, self.route, headers))
            for method, pattern, function in ROUTES:
                found = re.fullmatch(pattern, self.route)
                if found and self.command in method.split("|"):
                    status, headers, content = function(self, **found.groupdict())
                    break
            else:
                raise Answer(404, message=f"no such route: {self.command} {self.route}")
        except Answer as answer:
            status, headers, content = answer.status, answer.headers, json.dumps(answer.body).encode()
        except (KeyError, TypeError, ValueError, AttributeError):
            self.server.errors.append(traceback.format_exc())
            status, headers, content = 501, {}, b"{}"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def break_if_asked(self):
        for fault in self.server.faults:
            if fault.method == self.command and re.search(fault.path, self.route) and fault.times > 0:
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                if fault.status == 0:
                    self.server.hanging.set()
                    self.server.released.wait()
                self.read_body()
                raise Answer(fault.status, message="as the test asked", **fault.headers)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def user(self) -> User | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme and token not in self.server.users:
            raise Answer(401, message="Invalid credentials in Authorization header")
        return self.server.users.get(token)

    def repo(self, repo: str, write: bool = False) -> Repo:
        """A private repository does not exist for those who may not see it."""
        user, found = self.user(), self.server.repos.get(repo)
        mine = user is not None and repo.split("/")[0] in (user.name, *user.organisations)
        if found is None or (found.private and not mine):
            raise Answer(401 if user is None else 404, "RepoNotFound", "Repository not found")
        if write and not (mine and user.may_write):
            raise Answer(403, message="You have no write access to this repository")
        return found

    @staticmethod
    def revision(repo: Repo, revision: str) -> str:
        if revision in repo.branches:
            return repo.branches[revision]
        if revision in repo.commits:
            return revision
        raise Answer(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    def json(self, content, status: int = 200):
        return status, {"Content-Type": "application/json"}, json.dumps(content).encode()

    def store_blob(self, content: bytes) -> str:
        digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        self.server.blobs[digest] = content
        return digest

    def set_faults(self):
        self.server.faults = [Fault(**fault) for fault in json.loads(self.body)]
        return self.json({})

    def whoami(self):
        user = self.user()
        if user is None:
            raise Answer(401)
        return self.json({"type": "user", "name": user.name, "orgs": [{"name": name} for name in user.organisations]})

    def create(self):
        payload, user = json.loads(self.body), self.user()
        if user is None:
            raise Answer(401)
        owner = payload.get("organization") or user.name
        name = f"{owner}/{payload['name']}"
        if owner not in (user.name, *user.organisations) or not user.may_write:
            raise Answer(403, message=f"You don't have the rights to create a model under the namespace {owner}")
        if name in self.server.repos:
            raise Answer(409, message="You already created this model repo", url=f"{self.server.url}/{name}")
        repo = Repo(private=payload.get("visibility") == "private" or bool(payload.get("private")))
        content = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()
        repo.commit("main", {".gitattributes": ("regular", self.store_blob(content))}, "initial commit")
        self.server.repos[name] = repo
        return self.json({"url": f"{self.server.url}/{name}", "name": name})

    def validate_yaml(self):
        return self.json({"errors": [], "warnings": []})

    def info(self, repo: str, revision: str = "main"):
        found = self.repo(repo)
        oid = self.revision(found, revision)
        siblings = [{"rfilename": path} for path in found.commits[oid]]
        return self.json({"id": repo, "sha": oid, "private": found.private, "siblings": siblings, "tags": []})

    def branch(self, repo: str, branch: str):
        found = self.repo(repo, write=True)
        if branch in found.branches:
            raise Answer(409, message=f"Reference already exists: {branch}")
        start = json.loads(self.body or b"{}").get("startingPoint", "main")
        found.branches[branch] = self.revision(found, start)
        return self.json({})

    def tree(self, repo: str, revision: str, path: str | None):
        found = self.repo(repo)
        entries = []
        for name, (kind, digest) in found.commits[self.revision(found, revision)].items():
            if name.startswith((path or "").strip("/")):
                size = len(self.server.blobs[digest])
                lfs = {"lfs": {"oid": digest, "size": size, "pointerSize": 134}} if kind == "lfs" else {}
                entries.append({"type": "file", "path": name, "size": size, "oid": digest[:40], **lfs})
        return self.json(entries)

    def preupload(self, repo: str, revision: str):
        found = self.repo(repo, write=True)
        present = found.commits[self.revision(found, revision)]
        return self.json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                        "shouldIgnore": False,
                        **({"oid": present[file["path"]][1]} if file["path"] in present else {}),
                    }
                    for file in json.loads(self.body)["files"]
                ]
            }
        )

    def lfs_batch(self, repo: str):
        self.repo(repo, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.server.storage_url}/__lfs__/{wanted['oid']}", "header": {}}
            verify = {"href": f"{self.server.url}/{repo}.git/info/lfs/objects/verify"}
            missing = wanted["oid"] not in self.server.blobs
            objects.append(wanted | ({"actions": {"upload": upload, "verify": verify}} if missing else {}))
        return self.json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, digest: str):
        if hashlib.sha256(self.body).hexdigest() != digest:
            raise Answer(400, message="the content has another SHA-256")
        self.server.blobs[digest] = self.body
        return self.json({})

    def lfs_verify(self, repo: str):
        wanted = json.loads(self.body)
        if len(self.server.blobs.get(wanted["oid"], b"")) != wanted["size"]:
            raise Answer(404, message="no such object")
        return self.json({})

    def commit(self, repo: str, revision: str):
        found = self.repo(repo, write=True)
        files = dict(found.commits[self.revision(found, revision)])
        message = ""
        for line in self.body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = ("regular", self.store_blob(base64.b64decode(value["content"])))
            elif item["key"] == "lfsFile":
                if value["oid"] not in self.server.blobs:
                    raise Answer(400, message=f"LFS object {value['oid']} was not uploaded")
                files[value["path"]] = ("lfs", value["oid"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
        oid = found.commit(revision, files, message)
        return self.json({"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})

    def resolve(self, repo: str, revision: str, path: str):
        found = self.repo(repo)
        oid = self.revision(found, revision)
        if path not in found.commits[oid]:
            raise Answer(404, "EntryNotFound", "Entry not found", X_Repo_Commit=oid)
        kind, digest = found.commits[oid][path]
        size = str(len(self.server.blobs[digest]))
        headers = {"X-Repo-Commit": oid, "ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if kind == "lfs":
            where = f"{self.server.storage_url}/__lfs__/{digest}"
            headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": size, "Location": where}
            return 302, headers, b""
        return self.content(digest, headers)

    def content(self, digest: str, headers: dict[str, str] | None = None):
        if digest not in self.server.blobs:
            raise Answer(404)
        content, headers = self.server.blobs[digest], headers or {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted:
            return 200, headers, content
        start, last = int(wanted[1]), min(int(wanted[2] or len(content) - 1), len(content) - 1)
        return 206, headers | {"Content-Range": f"bytes {start}-{last}/{len(content)}"}, content[start : last + 1]


ROUTES = [
    ("POST", "/__faults__", Handler.set_faults),
    ("GET", "/api/whoami-v2", Handler.whoami),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.validate_yaml),
    ("GET", f"/api/models/{REPO}", Handler.info),
    ("GET", f"/api/models/{REPO}/revision/(?P<revision>.+)", Handler.info),
    ("POST", f"/api/models/{REPO}/branch/(?P<branch>.+)", Handler.branch),
    ("GET", f"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?P<path>/.*)?", Handler.tree),
    ("POST", f"/api/models/{REPO}/preupload/(?P<revision>.+)", Handler.preupload),
    ("POST", f"/api/models/{REPO}/commit/(?P<revision>.+)", Handler.commit),
    ("POST", f"/{REPO}.git/info/lfs/objects/batch", Handler.lfs_batch),
    ("POST", f"/{REPO}.git/info/lfs/objects/verify", Handler.lfs_verify),
    ("PUT", "/__lfs__/(?P<digest>[0-9a-f]{64})", Handler.lfs_upload),
    ("GET|HEAD", "/__lfs__/(?P<digest>[0-9a-f]{64})", Handler.content),
    ("GET|HEAD", f"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", Handler.resolve),
]
