"""Downloads the known datasets: resumable, checked against a checksum, and moved into place atomically."""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fedrane._version import __version__
from fedrane.data import catalogue
from fedrane.errors import DataError

Progress = Callable[[int, int | None, str], None]
"""Called after each chunk with (bytes done, total bytes if known, name of the file)."""

TRIES = 4
"""How many connections in a row may fail without receiving anything."""
PAUSE = 1.0
"""Seconds before the second try; doubled after each further failure."""

_TIMEOUT = 30.0
_CHUNK = 1 << 18
_PASSING = {408, 425, 429}
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class Remote:
    """A file to download: a dataset's file, or an archive of some of them."""

    url: str
    md5: str
    """The checksum that torchvision publishes."""
    members: tuple[str, ...] = ()
    """The files to unpack from an archive; each goes into the dataset's folder under its base name."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def gives(self) -> set[str]:
        """The files it provides, by their names in the catalogue."""
        return {PurePosixPath(member).name.removesuffix(".gz") for member in self.members or (self.name,)}


def _all_files(name: str) -> tuple[str, ...]:
    return (*catalogue.KNOWN[name].train_files, *catalogue.KNOWN[name].test_files)


_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_CIFAR = "https://www.cs.toronto.edu/~kriz"

SOURCES: Mapping[str, tuple[Remote, ...]] = {
    "fmnist": (
        Remote(f"{_FASHION}/train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        Remote(f"{_FASHION}/train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        Remote(f"{_FASHION}/t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        Remote(f"{_FASHION}/t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "emnist-letters": (
        Remote(
            "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
            "58c8d27c78d21e728a6bc7b3cc06412e",
            tuple(f"gzip/{name}.gz" for name in _all_files("emnist-letters")),
        ),
    ),
    "cifar10": (
        Remote(
            f"{_CIFAR}/cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            tuple(f"cifar-10-batches-py/{name}" for name in (*_all_files("cifar10"), "batches.meta")),
        ),
    ),
    "cifar100": (
        Remote(
            f"{_CIFAR}/cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            tuple(f"cifar-100-python/{name}" for name in (*_all_files("cifar100"), "meta")),
        ),
    ),
}


def get(
    name: str,
    root: Path | None = None,
    progress: Progress | None = None,
    sources: Mapping[str, tuple[Remote, ...]] = SOURCES,
) -> str:
    """Download a known dataset into the data root, and return one sentence on what was done.

    An incomplete file is kept next to its final path as ``….part``, and the next call resumes it. Only a complete file
    with a wrong checksum is deleted.
    """
    if name == catalogue.DIGITS:
        return "digits comes with scikit-learn: there is nothing to download"
    known, root = catalogue.known(name), catalogue.data_root(root)
    if there := catalogue.find(name, root):
        return f"{name} is already in {there}"
    folder = root / known.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for remote in sources[name]:
            if not remote.gives.isdisjoint(known.missing(folder)):
                _bring(remote, folder, progress or _silent)
    except OSError as error:
        raise DataError(
            f"cannot write in {folder}: {error.strerror or error}",
            "",
            "Free some space or choose another folder with FEDRANE_DATA; the download resumes where it stopped",
        ) from error
    return f"{name} is now in {folder}"


def _silent(done: int, total: int | None, label: str) -> None:
    pass


def _bring(remote: Remote, folder: Path, progress: Progress) -> None:
    part = folder / f"{remote.name}.part"
    if not _is_complete(part, remote.md5):  # it is complete if only unpacking failed before
        _download(remote, part, progress)
        if not _is_complete(part, remote.md5):
            part.unlink()
            raise DataError(
                f"the download of {remote.url} is corrupt: its MD5 is not {remote.md5}",
                "it has been deleted",
                "Try again; if it happens twice, the server has a different file",
            )
    if remote.members:
        _unpack(remote, part, folder)
        part.unlink()
    else:
        part.replace(folder / remote.name)


def _is_complete(part: Path, md5: str) -> bool:
    if not part.exists():
        return False
    with part.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _download(remote: Remote, part: Path, progress: Progress) -> None:
    """Download the rest of ``part``; gives up after ``TRIES`` failures in a row without new bytes."""
    failures, furthest = 0, _size(part)
    while True:
        try:
            return _stream(remote, part, progress)
        except HTTPError as error:
            error.close()
            if error.code == _RANGE_NOT_SATISFIABLE:
                part.unlink(missing_ok=True)  # at least as long as the file, but its checksum is wrong
                furthest = 0
            elif error.code < 500 and error.code not in _PASSING:
                raise DataError(
                    f"{remote.url} returned {error.code} {error.reason}",
                    "the server does not provide the file",
                    f"Get {', '.join(sorted(remote.gives))} elsewhere and put them in {part.parent}",
                ) from error
            reason = f"{error.code} {error.reason}"
        except (URLError, HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            reason = str(error.reason if isinstance(error, URLError) else error) or type(error).__name__
        size = _size(part)
        failures = 0 if size > furthest else failures + 1
        furthest = max(furthest, size)
        if failures == TRIES:
            raise DataError(
                f"{remote.url} could not be downloaded: {reason}",
                f"{size} bytes of it are kept in {part}",
                "Check the network and run it again: the download resumes",
            )
        time.sleep(PAUSE * 2**failures)


def _stream(remote: Remote, part: Path, progress: Progress) -> None:
    """Append to ``part`` over one connection, or start over if the server sends the whole file."""
    done = _size(part)
    headers = {"User-Agent": f"fedrane/{__version__}"} | ({"Range": f"bytes={done}-"} if done else {})
    with urlopen(Request(remote.url, headers=headers), timeout=_TIMEOUT) as response:  # noqa: S310 — our own addresses
        if response.status != 206:
            done = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise ConnectionError("the server sent a different range than requested")
        total = None if response.length is None else done + response.length
        with part.open("ab" if done else "wb") as sink:
            while piece := response.read(_CHUNK):
                sink.write(piece)
                done += len(piece)
                progress(done, total, remote.name)
            sink.flush()
            os.fsync(sink.fileno())
    if total is not None and done < total:
        raise ConnectionError(f"the connection was lost after {done} of {total} bytes")


def _unpack(remote: Remote, archive: Path, folder: Path) -> None:
    """Unpack the listed members, and nothing else, into ``folder``, each atomically."""
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=folder) as scratch:
        absent = set(remote.members)
        for member, source in _members(remote, archive):
            # Only the base name is used, so no member can end up outside the folder.
            with (Path(scratch) / PurePosixPath(member).name).open("wb") as sink:
                shutil.copyfileobj(source, sink)
                sink.flush()
                os.fsync(sink.fileno())
            absent.discard(member)
        if absent:
            raise DataError(f"{remote.url} does not contain {', '.join(sorted(absent))}", "it is another archive")
        for file in Path(scratch).iterdir():
            file.replace(folder / file.name)


def _members(remote: Remote, archive: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the listed members that are plain files, in archive order: a compressed archive is read only forward."""
    if remote.name.endswith(".zip"):
        with zipfile.ZipFile(archive) as unzipped:
            for name in unzipped.namelist():
                if name in remote.members:
                    with unzipped.open(name) as stored:
                        yield name, stored
    else:
        with tarfile.open(archive, "r:gz") as tar:
            for entry in tar:
                if entry.isreg() and entry.name in remote.members and (source := tar.extractfile(entry)):
                    yield entry.name, source
