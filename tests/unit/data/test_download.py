"""Downloads from a server of the test's own: whole and right, or not there at all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hoop.data import load, mnist, text
from hoop.data.download import CHUNK, download
from hoop.errors import FailedPrecondition, InvalidArgument

CONTENT = bytes(range(256)) * (CHUNK // 100)
CHECKSUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/gone":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if self.path == "/half" else CONTENT)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join(10)


def test_a_file_arrives_whole_and_progress_is_told(url: str, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = download(f"{url}/all", tmp_path / "new" / "file", CHECKSUM, progress=lambda *now: told.append(now))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert told == sorted(told)
    assert len(told) > 2


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"here")
    assert download("http://127.0.0.1:9/x", tmp_path / "file", CHECKSUM).read_bytes() == b"here"


@pytest.mark.parametrize("what", ["wrong", "half", "gone"])
def test_anything_else_is_refused_and_leaves_nothing(url: str, tmp_path: Path, what: str) -> None:
    checksum = "md5:" + "0" * 32 if what == "wrong" else CHECKSUM
    message = {
        "wrong": f"md5 expected {'0' * 32}, found {hashlib.md5(CONTENT).hexdigest()}",
        "half": "sha256 expected .*, found|IncompleteRead",
        "gone": "could not be downloaded .*404",
    }
    with pytest.raises(FailedPrecondition, match=message[what]) as caught:
        download(f"{url}/{what}", tmp_path / "file", checksum)
    assert f"{url}/{what}" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_a_server_that_is_not_there_is_named(url: str, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:1/x"
    with pytest.raises(FailedPrecondition, match=f"{closed} could not be downloaded.*put the file at"):
        download(closed, tmp_path / "file", CHECKSUM, timeout_s=5)


def test_only_the_web(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not http or https"):
        download("file:///etc/passwd", tmp_path / "file", CHECKSUM)


def test_a_dataset_is_fetched_into_the_cache_when_asked(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "SHAKESPEARE_URL", f"{url}/all")
    with pytest.raises(FailedPrecondition, match="sha256 expected 86c4e6aa"):
        load("tinyshakespeare", download=True)
    monkeypatch.setattr(text, "SHAKESPEARE_CHECKSUM", CHECKSUM)
    with pytest.raises(InvalidArgument, match="is not UTF-8"):  # it came, and is no text
        load("tinyshakespeare", download=True)
    assert (tmp_path / "home" / ".cache" / "hoop" / "tinyshakespeare.txt").read_bytes() == CONTENT


def test_fashion_mnist_is_fetched_file_by_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "FASHION_URL", url)
    monkeypatch.setattr(mnist, "FASHION_GZIPPED", dict.fromkeys(mnist.FASHION, CHECKSUM))
    with pytest.raises(FailedPrecondition, match=r"train-images-idx3-ubyte\.gz is damaged"):  # it is not gzipped
        load("fashion-mnist", download=True)
    folder = tmp_path / "home" / ".cache" / "hoop" / "fashion-mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in mnist.FASHION)
