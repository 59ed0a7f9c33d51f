"""Downloads from a local server that can disconnect, ignore ranges, send wrong data, or have no files."""

import errno
import gzip
import hashlib
import io
import struct
import tarfile
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedrane.data import catalogue, download
from fedrane.data.download import Remote
from fedrane.errors import DataError

STEMS = catalogue.KNOWN["fmnist"].train_files + catalogue.KNOWN["fmnist"].test_files
FILES = {
    f"{stem}.gz": gzip.compress(struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 28, 28) + bytes(range(196)) * 8)
    if "images" in stem
    else gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 2) + b"\x03\x04")
    for stem in STEMS
}
FIRST = "train-images-idx3-ubyte.gz"


class Server(ThreadingHTTPServer):
    """Serves ``files``; ``asked`` lists the requests (name, Range) in order."""

    def __init__(self, files):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.asked = files, []
        self.ranges = True
        self.length = True  # whether it says how long a file is
        self.break_after = []  # for the next requests: how many bytes to send before disconnecting
        self.fail_with = []  # for the next requests: the status to return

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def sources(self, name="fmnist", members=(), sha256=None):
        return {
            name: tuple(
                Remote(f"{self.url}/{file}", len(content), sha256 or hashlib.sha256(content).hexdigest(), members)
                for file, content in self.files.items()
            )
        }


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server, name, asked = self.server, self.path.rsplit("/", 1)[-1], self.headers.get("Range")
        server.asked.append((name, asked))
        if server.fail_with and (status := server.fail_with.pop(0)):
            self.send_error(status)
            return
        if name not in server.files:
            self.send_error(404)
            return
        content = server.files[name]
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and server.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        if server.length:
            self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + server.break_after.pop(0) if server.break_after else len(content)
        self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


@pytest.fixture(autouse=True)
def quick_and_local(monkeypatch):
    monkeypatch.setattr(download, "PAUSE", 0.001)
    monkeypatch.setattr(download, "SECURE", "http://127.0.0.1:")  # the server here has no certificate
    monkeypatch.setattr(catalogue, "SYSTEM", {})
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def serve():
    running = []

    def start(files=FILES):
        server = Server(files)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


def raw(root):
    return root / "FashionMNIST" / "raw"


def test_a_dataset_is_fetched_checked_and_readable(serve, tmp_path):
    server, seen = serve(), []
    message = download.get("fmnist", tmp_path, lambda *step: seen.append(step), server.sources())
    assert message == f"fmnist is now in {raw(tmp_path)}"
    assert sorted(path.name for path in raw(tmp_path).iterdir()) == sorted(FILES)
    assert catalogue.load("fmnist", tmp_path).y.tolist() == [3, 4]
    assert (len(FILES[FIRST]), len(FILES[FIRST]), FIRST) in seen


def test_what_is_there_is_not_fetched_again(serve, tmp_path):
    server = serve()
    download.get("fmnist", tmp_path, None, server.sources())
    server.asked.clear()
    assert download.get("fmnist", tmp_path, None, server.sources()) == f"fmnist is already in {raw(tmp_path)}"
    assert server.asked == []
    (raw(tmp_path) / FIRST).unlink()
    download.get("fmnist", tmp_path, None, server.sources())
    assert server.asked == [(FIRST, None)]
    assert "nothing to download" in download.get("digits", tmp_path)


def test_a_broken_connection_is_resumed_where_it_broke(serve, tmp_path):
    server = serve()
    server.break_after = [10, 5]
    download.get("fmnist", tmp_path, None, server.sources())
    assert [asked for asked in server.asked if asked[0] == FIRST] == [
        (FIRST, None),
        (FIRST, "bytes=10-"),
        (FIRST, "bytes=15-"),
    ]
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


def test_a_part_of_an_earlier_call_is_resumed(serve, tmp_path):
    server = serve()
    raw(tmp_path).mkdir(parents=True)
    (raw(tmp_path) / f"{FIRST}.part").write_bytes(FILES[FIRST][:20])
    download.get("fmnist", tmp_path, None, server.sources())
    assert server.asked[0] == (FIRST, "bytes=20-")
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


def test_a_server_that_ignores_ranges_is_heard_from_the_start(serve, tmp_path):
    server = serve()
    server.ranges = False
    server.break_after = [10]
    download.get("fmnist", tmp_path, None, server.sources())
    assert server.asked[:2] == [(FIRST, None), (FIRST, "bytes=10-")]
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


@pytest.mark.parametrize("extra", [0, 7], ids=["as long", "longer"])
def test_a_part_that_cannot_be_continued_is_started_over(serve, tmp_path, extra):
    server = serve()
    raw(tmp_path).mkdir(parents=True)
    (raw(tmp_path) / f"{FIRST}.part").write_bytes(b"?" * (len(FILES[FIRST]) + extra))
    download.get("fmnist", tmp_path, None, server.sources())
    assert server.asked[0] == (FIRST, None)
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


def test_a_part_beyond_the_end_of_the_servers_file_is_started_over(serve, tmp_path):
    server = serve()
    sources = server.sources()
    whole, server.files = server.files, server.files | {FIRST: FILES[FIRST][:15]}
    raw(tmp_path).mkdir(parents=True)
    (raw(tmp_path) / f"{FIRST}.part").write_bytes(b"?" * 20)  # the server returns 416

    def repaired(done, total, label):
        server.files = whole

    download.get("fmnist", tmp_path, repaired, sources)
    assert [asked for _, asked in server.asked[:3]] == ["bytes=20-", None, "bytes=15-"]
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


@pytest.mark.parametrize("announced", [True, False], ids=["length announced", "length not announced"])
def test_what_is_longer_than_the_file_is_not_written(serve, tmp_path, announced, monkeypatch):
    server = serve()
    sources, server.files = server.sources(), server.files | {FIRST: FILES[FIRST] + bytes(3_000_000)}
    server.length = announced
    written = []
    with pytest.raises(
        DataError, match=f"{FIRST} is longer than {len(FILES[FIRST])} bytes: the server has a different"
    ):
        download.get("fmnist", tmp_path, lambda done, *_: written.append(done), sources)
    assert all(done <= len(FILES[FIRST]) for done in written)
    assert list(raw(tmp_path).iterdir()) == []


def test_an_address_without_encryption_is_refused(serve, tmp_path, monkeypatch):
    server = serve()
    monkeypatch.setattr(download, "SECURE", "https://")
    with pytest.raises(DataError, match=f"leads to {server.url}/{FIRST}: it is not encrypted"):
        download.get("fmnist", tmp_path, None, server.sources())
    assert list(raw(tmp_path).iterdir()) == []


def test_a_part_that_is_already_whole_needs_no_server(serve, tmp_path):
    server = serve()
    raw(tmp_path).mkdir(parents=True)
    (raw(tmp_path) / f"{FIRST}.part").write_bytes(FILES[FIRST])
    download.get("fmnist", tmp_path, None, server.sources())
    assert FIRST not in [name for name, _ in server.asked]
    assert (raw(tmp_path) / FIRST).read_bytes() == FILES[FIRST]


def test_no_file_has_its_name_before_it_is_whole(serve, tmp_path):
    server = serve()

    def look(done, total, label):
        assert not (raw(tmp_path) / label).exists()
        assert (raw(tmp_path) / f"{label}.part").exists()
        assert done <= total

    download.get("fmnist", tmp_path, look, server.sources())
    assert (raw(tmp_path) / FIRST).exists()


def test_a_server_that_always_breaks_off_is_given_up_and_its_part_kept(serve, tmp_path):
    server = serve()
    server.break_after = [10] + [0] * 20
    with pytest.raises(DataError, match="lost after 10 of") as caught:
        download.get("fmnist", tmp_path, None, server.sources())
    assert f"{server.url}/{FIRST}" in caught.value.problem
    assert len(server.asked) == 1 + download.TRIES
    assert (raw(tmp_path) / f"{FIRST}.part").read_bytes() == FILES[FIRST][:10]
    assert not (raw(tmp_path) / FIRST).exists()


def test_a_passing_failure_of_the_server_is_waited_for(serve, tmp_path):
    server = serve()
    server.fail_with = [503, 429]
    download.get("fmnist", tmp_path, None, server.sources())
    assert (raw(tmp_path) / FIRST).exists()


def test_a_wrong_checksum_leaves_nothing(serve, tmp_path):
    server = serve()
    with pytest.raises(DataError, match="its SHA-256 is not 0000") as caught:
        download.get("fmnist", tmp_path, None, server.sources(sha256="0" * 64))
    assert f"{server.url}/{FIRST}" in caught.value.problem
    assert list(raw(tmp_path).iterdir()) == []


def test_a_file_missing_on_the_server_is_reported_at_once_and_the_part_kept(serve, tmp_path):
    server = serve()
    sources = server.sources()
    server.files = {}
    raw(tmp_path).mkdir(parents=True)
    (raw(tmp_path) / f"{FIRST}.part").write_bytes(b"begun")
    with pytest.raises(DataError, match="returned 404"):
        download.get("fmnist", tmp_path, None, sources)
    assert len(server.asked) == 1
    assert (raw(tmp_path) / f"{FIRST}.part").read_bytes() == b"begun"


def test_no_network_is_one_clear_error(serve, tmp_path):
    server = serve()
    sources = server.sources()
    server.shutdown()
    server.server_close()
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        download.get("fmnist", tmp_path, None, sources)
    assert "Check the network" in caught.value.remedy


def test_a_full_disk_is_one_clear_error_and_the_part_is_kept(serve, tmp_path, monkeypatch):
    server = serve()

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device") as caught:
        download.get("fmnist", tmp_path, None, server.sources())
    assert str(raw(tmp_path)) in caught.value.problem
    assert (raw(tmp_path) / f"{FIRST}.part").exists()


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "FashionMNIST").write_text("a file")
    with pytest.raises(DataError, match="cannot write in"):
        download.get("fmnist", tmp_path)


def test_an_unknown_name_gets_the_nearest_as_a_suggestion(tmp_path):
    with pytest.raises(DataError, match="Did you mean 'cifar100'"):
        download.get("cifar1000", tmp_path)


def tar_of(members, links=()):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        for name, target in links:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return packed.getvalue()


TAR = "cifar-100-python.tar.gz"
MEMBERS = tuple(f"cifar-100-python/{name}" for name in ("train", "test", "meta"))
assert download.SOURCES["cifar100"][0].members == MEMBERS


def test_of_an_archive_only_what_is_wanted_is_unpacked(serve, tmp_path):
    wanted = {name: name.encode() * 1000 for name in MEMBERS}
    others = {"../escape": b"!", "/tmp/absolute-escape": b"!", "cifar-100-python/extra": b"!"}  # noqa: S108
    server = serve({TAR: tar_of(others | wanted)})
    root = tmp_path / "root"
    download.get("cifar100", root, None, server.sources("cifar100", MEMBERS))
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == wanted


def test_a_link_in_an_archive_is_not_followed(serve, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    content = tar_of({MEMBERS[0]: b"1", MEMBERS[1]: b"2"}, links=[(MEMBERS[2], str(secret))])
    server = serve({TAR: content})
    with pytest.raises(DataError, match="does not contain cifar-100-python/meta"):
        download.get("cifar100", tmp_path, None, server.sources("cifar100", MEMBERS))
    assert [path.name for path in (tmp_path / "cifar-100-python").iterdir()] == [f"{TAR}.part"]


def test_a_zip_is_unpacked(serve, tmp_path):
    members = download.SOURCES["emnist-letters"][0].members
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name in (*members, "gzip/emnist-digits-train-images-idx3-ubyte.gz"):
            archive.writestr(name, name)
    server = serve({"gzip.zip": packed.getvalue()})
    download.get("emnist-letters", tmp_path, None, server.sources("emnist-letters", members))
    folder = tmp_path / "EMNIST" / "raw"
    assert sorted(path.name for path in folder.iterdir()) == sorted(Path(name).name for name in members)
    assert (folder / "emnist-letters-test-labels-idx1-ubyte.gz").read_text() == members[-1]


def test_an_archive_that_could_not_be_unpacked_is_not_fetched_again(serve, tmp_path, monkeypatch):
    server = serve({TAR: tar_of(dict.fromkeys(MEMBERS, b"content"))})
    sources = server.sources("cifar100", MEMBERS)

    def full(source, sink):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(download.shutil, "copyfileobj", full)
        with pytest.raises(DataError, match="No space left"):
            download.get("cifar100", tmp_path, None, sources)
    assert catalogue.find("cifar100", tmp_path) is None
    download.get("cifar100", tmp_path, None, sources)
    assert len(server.asked) == 1
    assert sorted(path.name for path in (tmp_path / "cifar-100-python").iterdir()) == ["meta", "test", "train"]


def test_every_known_dataset_has_a_source_for_each_of_its_files():
    assert set(download.SOURCES) == {name for name, entry in catalogue.KNOWN.items() if not entry.by_hand}
    for name, remotes in download.SOURCES.items():
        given = set().union(*(remote.gives for remote in remotes))
        assert set(catalogue.KNOWN[name].missing(Path("/nowhere"))) <= given
        assert all(len(bytes.fromhex(remote.sha256)) == 32 for remote in remotes)
        assert all(remote.url.startswith("https://") and 1000 < remote.size < 10**9 for remote in remotes)
