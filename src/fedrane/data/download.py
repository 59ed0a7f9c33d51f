"""Downloads the known datasets: over https, resumable, checked by size and SHA-256, and moved into place atomically."""

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
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from fedrane._version import __version__
from fedrane.data import catalogue
from fedrane.errors import DataError

Progress = Callable[[int, int, str], None]
"""Called after each chunk with (bytes done, total bytes, name of the file)."""

TRIES = 4
"""How many connections in a row may fail without receiving anything."""
PAUSE = 1.0
"""Seconds before the second try; doubled after each further failure."""

SECURE = "https://"
"""How every address begins."""

_TIMEOUT = 30.0
_CHUNK = 1 << 18
_PASSING = {408, 425, 429}
_RANGE_NOT_SATISFIABLE = 416


@dataclass(frozen=True)
class Remote:
    """A file to download: a dataset's file, or an archive of some of them."""

    url: str
    size: int
    """In bytes. A server that sends more is not listened to any further."""
    sha256: str
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


_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion"
_CIFAR = "https://www.cs.toronto.edu/~kriz"

_MNIST = "https://storage.googleapis.com/cvdf-datasets/mnist"
_KMNIST = "https://codh.rois.ac.jp/kmnist/dataset/kmnist"
_SVHN = "https://ufldl.stanford.edu/housenumbers"


def _emnist(name: str) -> Remote:
    """The archive that holds all versions of EMNIST, for one of them."""
    return Remote(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        561_753_746,
        "fb9bb67e33772a9cc0b895e4ecf36d2cf35be8b709693c3564cea2a019fcda8e",
        tuple(f"gzip/{file}.gz" for file in _all_files(name)),
    )


SOURCES: Mapping[str, tuple[Remote, ...]] = {
    "mnist": (
        Remote(
            f"{_MNIST}/train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        Remote(
            f"{_MNIST}/train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        Remote(
            f"{_MNIST}/t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        Remote(
            f"{_MNIST}/t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    "kmnist": (
        Remote(
            f"{_KMNIST}/train-images-idx3-ubyte.gz",
            18_165_135,
            "51467d22d8cc72929e2a028a0428f2086b092bb31cfb79c69cc0a90ce135fde4",
        ),
        Remote(
            f"{_KMNIST}/train-labels-idx1-ubyte.gz",
            29_497,
            "e38f9ebcd0f3ebcdec7fc8eabdcdaef93bb0df8ea12bee65224341c8183d8e17",
        ),
        Remote(
            f"{_KMNIST}/t10k-images-idx3-ubyte.gz",
            3_041_136,
            "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
        ),
        Remote(
            f"{_KMNIST}/t10k-labels-idx1-ubyte.gz",
            5_120,
            "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        ),
    ),
    "svhn": (
        Remote(
            f"{_SVHN}/train_32x32.mat",
            182_040_794,
            "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",
        ),
        Remote(
            f"{_SVHN}/test_32x32.mat",
            64_275_384,
            "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
        ),
    ),
    "fmnist": (
        Remote(
            f"{_FASHION}/train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        Remote(
            f"{_FASHION}/train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        Remote(
            f"{_FASHION}/t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        Remote(
            f"{_FASHION}/t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    "emnist-letters": (_emnist("emnist-letters"),),
    "emnist-balanced": (_emnist("emnist-balanced"),),
    "cifar10": (
        Remote(
            f"{_CIFAR}/cifar-10-python.tar.gz",
            170_498_071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            tuple(f"cifar-10-batches-py/{name}" for name in (*_all_files("cifar10"), "batches.meta")),
        ),
    ),
    "cifar100": (
        Remote(
            f"{_CIFAR}/cifar-100-python.tar.gz",
            169_001_437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
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
    if name in catalogue.EMBEDDED:
        return f"{name} comes with {catalogue.EMBEDDED[name].comes_with}: there is nothing to download"
    known, root = catalogue.known(name), catalogue.data_root(root)
    if there := catalogue.find(name, root):
        return f"{name} is already in {there}"
    folder = root / known.folder
    if known.by_hand:
        raise DataError(
            f"{name} is not downloaded",
            "there is no single file of it with a known SHA-256",
            f"By hand: {known.by_hand} into {folder}",
        )
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


def _silent(done: int, total: int, label: str) -> None:
    pass


def _bring(remote: Remote, folder: Path, progress: Progress) -> None:
    part = folder / f"{remote.name}.part"
    if not _is_complete(part, remote):  # it is complete if only unpacking failed before
        if _size(part) >= remote.size:
            part.unlink()  # nothing can be added to it
        _download(remote, part, progress)
        if not _is_complete(part, remote):
            part.unlink()
            raise DataError(
                f"the download of {remote.url} is corrupt: its SHA-256 is not {remote.sha256}",
                "it has been deleted",
                "Try again; if it happens twice, the server has a different file",
            )
    if remote.members:
        _unpack(remote, part, folder)
        part.unlink()
    else:
        part.replace(folder / remote.name)


def _is_complete(part: Path, remote: Remote) -> bool:
    if _size(part) != remote.size:
        return False
    with part.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == remote.sha256


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


def _open(request: Request) -> HTTPResponse:
    """Connect; an address that is not https, also after a redirect, is an error."""
    response: HTTPResponse = urlopen(request, timeout=_TIMEOUT)  # noqa: S310 — our own addresses
    if not response.url.startswith(SECURE):
        response.close()
        raise DataError(
            f"{request.full_url} leads to {response.url}", "it is not encrypted, so anybody on the way can read it"
        )
    return response


def _stream(remote: Remote, part: Path, progress: Progress) -> None:
    """Append to ``part`` over one connection, or start over if the server sends the whole file."""
    done = _size(part)
    headers = {"User-Agent": f"fedrane/{__version__}"} | ({"Range": f"bytes={done}-"} if done else {})
    with _open(Request(remote.url, headers=headers)) as response:  # noqa: S310 — our own addresses
        if response.status != 206:
            done = 0
        elif not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
            part.unlink()
            raise ConnectionError("the server sent a different range than requested")
        if response.length is not None and done + response.length > remote.size:
            raise _too_long(remote, part)  # before a byte of it is written
        with part.open("ab" if done else "wb") as sink:
            while piece := response.read(_CHUNK):
                done += len(piece)
                if done > remote.size:
                    raise _too_long(remote, part)
                sink.write(piece)
                progress(done, remote.size, remote.name)
            sink.flush()
            os.fsync(sink.fileno())
    if done < remote.size:
        raise ConnectionError(f"the connection was lost after {done} of {remote.size} bytes")


def _too_long(remote: Remote, part: Path) -> DataError:
    part.unlink(missing_ok=True)
    return DataError(
        f"{remote.url} is longer than {remote.size} bytes",
        "the server has a different file",
        f"Get {', '.join(sorted(remote.gives))} elsewhere and put them in {part.parent}",
    )


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
