"""``hoop.train`` in programs as users have them: callbacks, the best checkpoint, compiled models, notebooks."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import preloaded
import pytest

HEAD = """
import asyncio, json, sys, threading
import torch
from torch import nn
import hoop

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 6, generator=generator)
y = (x @ torch.randn(6, 3, generator=generator)).argmax(1)

def new_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def show(**found):
    print(json.dumps(found), flush=True)
"""
CALLBACKS = """
from pathlib import Path
sys.path.append(sys.argv[2])
from written_checkpoints import wait_for_files

class Recorder(hoop.Callback):
    def __init__(self): self.calls = []
    def on_start(self, run, steps, parameters): self.calls.append(["start", steps, parameters])
    def on_step(self, run, step, loss, metrics): self.calls.append(["step", step, loss, metrics["learning_rate"]])
    def on_evaluate(self, run, step, loss, accuracy, metrics, best):
        self.calls.append(["evaluate", step, loss, best])
    def on_checkpoint(self, run, step, path): self.calls.append(["checkpoint", step, path])
    def on_end(self, run, summary): self.calls.append(["end", summary["steps"]])

class Stopper(hoop.Callback):
    def on_step(self, run, step, loss, metrics): run.stop()

stopped = hoop.train(new_model(), (x, y), loss=loss, devices=1, batch_size=8, epochs=1000, callbacks=Stopper(),
                     memory="16MiB")
recorder = Recorder()
wait_for_files(Path(sys.argv[1]))
# A rate that is too high: evaluations become worse, and training ends early.
result = hoop.train(new_model(), ((x, y), (x[:20], y.roll(1)[:20])), loss=loss, optimizer=torch.optim.Rprop, devices=2,
                    batch_size=32, epochs=40, patience=2, out=sys.argv[1], keep=1, callbacks=[recorder], memory="16MiB")
show(calls=recorder.calls, weights=result.weights_sha256, stopped=stopped.summary["stopped"], steps=stopped.steps)
"""
SURROUNDINGS = """
def train(model, devices):
    return hoop.train(model, (x, y), loss=loss, devices=devices, epochs=2, batch_size=24).weights_sha256

def in_a_thread():
    found = []
    one = threading.Thread(target=lambda: found.append(train(new_model(), 2)))
    one.start()
    one.join()
    return found[0]

async def in_an_event_loop():  # as in a notebook
    return train(new_model(), 2)

torch.set_num_threads(2)
torch.randn(600, 600) @ torch.randn(600, 600)  # PyTorch's threads are there before the fork
resting = threading.Event()
threading.Thread(target=resting.wait, daemon=True).start()
alone = train(new_model(), 1)
def compiled():
    return torch.compile(new_model(), backend="aot_eager")  # which needs no compiler

show(alone=alone, thread=in_a_thread(), loop=asyncio.run(in_an_event_loop()), again=train(new_model(), 3),
     compiled=[train(compiled(), devices) for devices in (1, 2)])
"""
TRACE = """
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
result = hoop.train(new_model(), (x, y), devices=2, batch_size=8, epochs=2, faults="kill@rank=1,step=5",
                    memory="16MiB", out=sys.argv[1], callbacks=[hoop.OpenTelemetryLogger(provider.get_tracer("test"))])
spans = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
exporter.clear()
try:
    hoop.train(new_model(), (x * float("inf"), y), devices=1, batch_size=8, epochs=2, memory="16MiB",
               callbacks=[hoop.OpenTelemetryLogger(provider.get_tracer("test"))])
    raised = ""
except hoop.HoopError as error:
    raised = str(error)
failed = [json.loads(span.to_json()) for span in exporter.get_finished_spans()]
show(weights=result.weights_sha256, spans=spans, raised=raised, failed=failed)
"""
DATASETS = """
import datasets

rows = datasets.Dataset.from_dict({"x": x.tolist(), "y": y.tolist()})

def collate(samples):
    return torch.tensor([one["x"] for one in samples]), torch.tensor([one["y"] for one in samples])

def train(data, devices, **more):
    return hoop.train(new_model(), data, loss=loss, devices=devices, epochs=2, batch_size=24, memory="16MiB",
                      **more).weights_sha256

show(plain=train((x, y), 1), rows=[train(rows, devices, collate_fn=collate) for devices in (1, 2)],
     formatted=train(rows.with_format("torch"), 2, collate_fn=lambda samples: tuple(
         torch.stack([one[key] for one in samples]) for key in ("x", "y"))))
"""


def shown(program: str, *arguments: str, forked: bool = False, timeout: float = 500) -> dict[str, Any]:
    """What a program prints that comes from standard input: there is no file, and no ``__main__`` guard.

    ``forked``: from the command line, in a process that is forked with its imports.
    """
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": timeout}
    if forked:
        done = preloaded.run([sys.executable, "-c", HEAD + program, *arguments], **options)
    else:
        done = subprocess.run([sys.executable, "-", *arguments], input=HEAD + program, check=False, **options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_callbacks_are_called_in_order_and_the_best_checkpoint_stays(tmp_path: Path) -> None:
    from hoop.runs.checkpoint_store import BEST, FOLDER, read

    found = shown(CALLBACKS, str(tmp_path / "run"), str(Path(__file__).parents[1]), forked=True)
    kinds = [call[0] for call in found["calls"]]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    steps = [call for call in found["calls"] if call[0] == "step"]
    assert [call[1] for call in steps] == list(range(1, len(steps) + 1)), "every step once, in order"
    evaluations = [call for call in found["calls"] if call[0] == "evaluate"]
    best = [call[1] for call in evaluations if call[3]][-1]
    assert best == min(evaluations, key=lambda call: call[2])[1]
    assert evaluations[-1][1] == best + 2 * 3, "it ends after two evaluations that are not better, 3 steps an epoch"
    folder = tmp_path / "run" / FOLDER
    assert read(folder / BEST)[1]["steps"] == best
    assert sorted(one.name for one in folder.iterdir()) == [BEST, f"step-{evaluations[-1][1]:08}.safetensors"]
    assert found["stopped"]
    assert found["steps"] < 12_000


HAS_OPENTELEMETRY = find_spec("opentelemetry") is not None and find_spec("opentelemetry.sdk") is not None


@pytest.mark.skipif(not HAS_OPENTELEMETRY, reason="needs OpenTelemetry: pip install opentelemetry-sdk")
def test_a_run_is_a_trace_of_opentelemetry(tmp_path: Path) -> None:
    found = shown(TRACE, str(tmp_path / "run"))
    *children, run = found["spans"]
    assert run["name"] == "hoop.train"
    assert run["parent_id"] is None
    assert run["attributes"]["hoop.weights_sha256"] == found["weights"]
    assert {span["parent_id"] for span in children} == {run["context"]["span_id"]}
    (recovery,) = (span for span in children if span["name"] == "hoop.recovered")
    assert recovery["attributes"]["hoop.ranks"] == 1
    assert run["start_time"] <= recovery["start_time"] <= recovery["end_time"] <= run["end_time"]
    steps = [span["attributes"] for span in children if span["name"] == "hoop.steps"]
    assert [span["hoop.first"] for span in steps] == [1, *(span["hoop.last"] + 1 for span in steps[:-1])]
    assert steps[-1]["hoop.last"] == 24
    assert [span["attributes"]["hoop.steps"] for span in children if span["name"] == "hoop.checkpoint"] == [12, 24]
    assert {"fault", "lost", "evaluated"} <= {event["name"] for event in run["events"]}
    *_, failed = found["failed"]
    assert (failed["name"], failed["status"]["status_code"]) == ("hoop.train", "ERROR")
    assert failed["status"]["description"] == found["raised"] != ""


@pytest.mark.slow
def test_the_surroundings_of_a_program_do_not_change_the_weights() -> None:
    found = shown(SURROUNDINGS)
    assert found["thread"] == found["loop"] == found["again"] == found["alone"]
    assert found["compiled"][0] == found["compiled"][1]


@pytest.mark.skipif(find_spec("datasets") is None, reason="needs Hugging Face datasets: pip install 'hoop[trainers]'")
def test_hugging_face_datasets_train_as_tensors_do() -> None:
    found = shown(DATASETS, forked=True)
    assert found["rows"] == [found["plain"]] * 2
    assert found["formatted"] == found["plain"]
