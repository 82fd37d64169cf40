"""Downloads from a local server: a file is complete and verified, or absent."""

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


def test_a_file_is_downloaded_and_progress_is_reported(url: str, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    path = download(f"{url}/all", tmp_path / "new" / "file", CHECKSUM, progress=lambda *now: reports.append(now))
    assert path.read_bytes() == CONTENT
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert reports == sorted(reports)
    assert len(reports) > 2


def test_an_existing_file_is_not_downloaded_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"here")
    assert download("http://127.0.0.1:9/x", tmp_path / "file", CHECKSUM).read_bytes() == b"here"


@pytest.mark.parametrize("failure", ["wrong", "half", "gone"])
def test_a_failed_download_is_reported_and_leaves_no_file(url: str, tmp_path: Path, failure: str) -> None:
    checksum = "md5:" + "0" * 32 if failure == "wrong" else CHECKSUM
    message = {
        "wrong": f"md5 expected {'0' * 32}, found {hashlib.md5(CONTENT).hexdigest()}",
        "half": "sha256 expected .*, found|IncompleteRead",
        "gone": "could not be downloaded .*404",
    }
    with pytest.raises(FailedPrecondition, match=message[failure]) as caught:
        download(f"{url}/{failure}", tmp_path / "file", checksum)
    assert f"{url}/{failure}" in str(caught.value)
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_a_download_that_does_not_end_is_stopped(url: str, tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match=rf"{url}/all .* more than the {CHUNK} bytes"):
        download(f"{url}/all", tmp_path / "file", CHECKSUM, max_bytes=CHUNK)
    assert list(tmp_path.iterdir()) == [tmp_path / "data"]


def test_an_unreachable_server_is_reported(url: str, tmp_path: Path) -> None:
    closed = "http://127.0.0.1:1/x"
    with pytest.raises(FailedPrecondition, match=f"{closed} could not be downloaded.*put the file at"):
        download(closed, tmp_path / "file", CHECKSUM, timeout_s=5)


def test_only_http_and_https_are_accepted(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not http or https"):
        download("file:///etc/passwd", tmp_path / "file", CHECKSUM)


def test_a_dataset_is_downloaded_into_the_cache_on_request(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "SHAKESPEARE_URL", f"{url}/all")
    with pytest.raises(FailedPrecondition, match="sha256 expected 86c4e6aa"):
        load("tinyshakespeare", download=True)
    monkeypatch.setattr(text, "SHAKESPEARE_CHECKSUM", CHECKSUM)
    with pytest.raises(InvalidArgument, match="is not UTF-8"):  # downloaded, but not text
        load("tinyshakespeare", download=True)
    assert (tmp_path / "home" / ".cache" / "hoop" / "tinyshakespeare.txt").read_bytes() == CONTENT


def test_fashion_mnist_is_downloaded_file_by_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "FASHION_URL", url)
    monkeypatch.setattr(mnist, "FASHION_GZIPPED", dict.fromkeys(mnist.FASHION, CHECKSUM))
    with pytest.raises(FailedPrecondition, match=r"train-images-idx3-ubyte\.gz is damaged"):  # it is not gzipped
        load("fashion-mnist", download=True)
    folder = tmp_path / "home" / ".cache" / "hoop" / "fashion-mnist"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in mnist.FASHION)
