"""A training on Ray for a program outside of the cluster (``ray://HOST:10001``), which reaches no coordinator there.

    program ── DriverActor ──▶ the training, as a program in the cluster would run it
            ◀── news: events, and the files of the run that changed ── DriverActor

The files of the run are written to ``out`` of the program, as if it had followed the job itself.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hoop.errors import HoopError, InternalError, PeerLost, error_from_name
from hoop.files import write_bytes
from hoop.job_events import Finished, Observed
from hoop.launch.ray_cluster import DeviceCode, Ray, connect_ray, import_ray

NEWS_S = 1.0
"""How long a call for news waits for an event."""
FILES_S = 2.0
"""Files are compared this often, and at the end."""
CALL_S = 120.0
Seen = dict[str, tuple[int, int]]
"""Files by their path in the run's folder: size and time of the last change."""


@dataclass(frozen=True)
class News:
    """What happened since the last call."""

    events: list[dict[str, Any]]
    files: dict[str, bytes] = field(default_factory=dict)
    """New contents of the files that changed."""
    seen: Seen | None = None
    """All files of the run; None: they were not compared."""
    error: tuple[str, str] | None = None
    """Class and text of the error that ended the training."""
    ended: bool = False


class DriverActor:
    """The program's deputy in the cluster: it runs the training, and owns its actors, which end with it."""

    def __init__(self, training: Callable[..., Any], launch: Any, files: dict[str, bytes], save: bool) -> None:
        """``training``: the class ``Training``. ``launch``: its ``out`` and ``resume`` are relative to ``files``."""
        self._folder = Path(tempfile.mkdtemp(prefix="hoop-ray-"))
        self._out = self._folder / "out"
        write_files(self._out, files)
        if launch.resume is not None:
            launch = replace(launch, resume=self._out / launch.resume)
        if launch.out is not None:
            launch = replace(launch, out=self._out)
        self._weights = self._folder / "weights.safetensors" if save else None
        self._training = training(launch, save=self._weights)
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._error: tuple[str, str] | None = None
        threading.Thread(target=self._run, name="hoop-training", daemon=True).start()

    def _run(self) -> None:
        try:
            for observed in self._training.events():
                event = observed.event
                if isinstance(event, Finished) and event.result.get("checkpoint"):
                    kept = Path(event.result["checkpoint"]).relative_to(self._out)
                    observed = replace(observed, event=Finished({**event.result, "checkpoint": str(kept)}))
                self._events.put(observed.to_fields())
        except HoopError as error:
            self._error = type(error).__name__, str(error)
        except Exception as error:
            self._error = InternalError.__name__, f"{type(error).__name__}: {error}"
        finally:
            self._events.put(None)

    def news(self, seen: Seen, compare: bool) -> News:
        """Waits a little for events. ``compare``: send what differs from the caller's files; at the end too."""
        events: list[dict[str, Any]] = []
        ended = False
        with contextlib.suppress(queue.Empty):
            while not ended:
                event = self._events.get(block=not events, timeout=NEWS_S)
                ended = event is None
                if event is not None:
                    events.append(event)
        if not compare and not ended:
            return News(events)
        now = files_in(self._out)
        changed = [name for name, state in now.items() if seen.get(name) != state]
        contents = {}
        for name in changed:
            with contextlib.suppress(FileNotFoundError):  # an older checkpoint, removed meanwhile
                contents[name] = (self._out / name).read_bytes()
        return News(events, contents, now, self._error if ended else None, ended)

    def weights(self) -> bytes:
        """The trained weights, if they were asked for."""
        return b"" if self._weights is None else self._weights.read_bytes()

    def stop(self) -> None:
        self._training.stop()

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def files_in(folder: Path) -> Seen:
    """The files of a run. Those that ``hoop.files.atomic_write`` has not finished have names that begin with a dot."""
    found: Seen = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            if path.is_file() and not path.name.startswith("."):
                state = path.stat()
                found[str(path.relative_to(folder))] = state.st_size, state.st_mtime_ns
    return found


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)


def run_through_client(
    training: Callable[..., Any],
    launch: Any,
    where: Ray,
    code: DeviceCode,
    save: Path | None,
    on_stop: Callable[[Callable[[], None]], None],
) -> Iterator[Observed]:
    """Runs ``training(launch)`` in an actor; yields its events, and writes its files to ``launch.out``."""
    ray = import_ray()
    connected = connect_ray(where, code.working_dir)
    out: Path | None = launch.out
    files = {}
    inner = replace(launch, ray=replace(where, address=None), warnings=(), address_file=None)
    if launch.resume is not None and out is not None:
        files = {name: (out / name).read_bytes() for name in files_in(out)}
        inner = replace(inner, resume=launch.resume.relative_to(out))
    actor = ray.remote(DriverActor).options(num_cpus=0, max_concurrency=4)
    driver = actor.remote(training, inner, files, save is not None)
    on_stop(lambda: driver.stop.remote())
    try:
        yield from _follow(ray, driver, out)
        if save is not None:
            write_bytes(save, ray.get(driver.weights.remote(), timeout=CALL_S))
    except ray.exceptions.RayActorError as error:
        raise PeerLost(f"ray: the actor that follows the training was lost: {error}") from None
    finally:
        with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
            ray.get(driver.close.remote(), timeout=CALL_S)
            ray.kill(driver)
        if connected:
            ray.shutdown()


def _follow(ray: Any, driver: Any, out: Path | None) -> Iterator[Observed]:
    seen: Seen = {}
    compared = time.monotonic()
    while True:
        news: News = ray.get(driver.news.remote(seen, time.monotonic() - compared > FILES_S), timeout=CALL_S)
        if out is not None and news.seen is not None:
            write_files(out, news.files)
            for name in set(seen) - set(news.seen):
                (out / name).unlink(missing_ok=True)
            seen, compared = news.seen, time.monotonic()
        for fields in news.events:
            yield _here(Observed.from_fields(fields), out)
        if news.error is not None:
            raise error_from_name(*news.error)
        if news.ended:
            return


def _here(observed: Observed, out: Path | None) -> Observed:
    """The event with the path of the checkpoint in this program's folder."""
    event = observed.event
    if not isinstance(event, Finished) or out is None or not event.result.get("checkpoint"):
        return observed
    return replace(observed, event=Finished({**event.result, "checkpoint": str(out / event.result["checkpoint"])}))
