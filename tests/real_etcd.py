"""Runs a real etcd server for a test, if the program is installed."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from free_ports import free_port

from hoop.errors import DeadlineExceeded
from hoop.servers.etcd_journal import Etcd
from hoop.topology import Addresses
from hoop.wire.generated import etcd_pb2 as pb

PROGRAM = os.environ.get("HOOP_ETCD") or shutil.which("etcd")
START_S = 120.0
needs_etcd = pytest.mark.skipif(
    PROGRAM is None, reason="etcd is not on PATH (Debian: etcd-server), nor does HOOP_ETCD name it"
)
ENV = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"} if platform.machine() == "aarch64" else None


class RealEtcd:
    """One etcd server. Its data survive ``kill``; ``start`` restarts it at the same address."""

    def __init__(self, folder: Path, options: tuple[str, ...] = (), scheme: str = "http") -> None:
        self.address = f"127.0.0.1:{free_port()}"
        client, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{free_port()}"
        self._command = [
            *(str(PROGRAM), "--data-dir", str(folder / "etcd"), "--log-outputs", str(folder / "etcd.log")),
            *("--logger", "zap", "--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"default={peer}", *options),
        ]
        self._log = folder / "etcd.log"
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def until_up(self, tls: Path | None = None) -> None:
        """Waits until the server answers."""
        deadline = time.monotonic() + START_S
        with self.api(tls) as api:
            while time.monotonic() < deadline and self._process.poll() is None:
                with suppress(DeadlineExceeded):
                    api.call(lambda etcd: etcd.kv.Range, pb.RangeRequest(key=b"x"), 1.0)
                    return
                time.sleep(0.05)
        log = self._log.read_text() if self._log.exists() else ""
        raise AssertionError(f"etcd did not answer at {self.address}: {log[-3000:]}")

    @contextmanager
    def api(self, tls: Path | None = None) -> Iterator[Etcd]:
        """A client for direct requests to etcd, bypassing the coordinator."""
        etcd = Etcd(Addresses.parse(self.address), tls)
        try:
            yield etcd
        finally:
            etcd.close()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # a thread that still runs could answer a last request
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


@contextmanager
def running_etcd(
    folder: Path, options: tuple[str, ...] = (), scheme: str = "http", tls: Path | None = None
) -> Iterator[RealEtcd]:
    etcd = RealEtcd(folder, options, scheme)
    try:
        etcd.until_up(tls)
        yield etcd
    finally:
        etcd.kill()
