"""A rank is killed or stopped during training: how long until the next step is finished, and what is lost.

    python benchmarks/recovery/recovery.py --turns 3
    python benchmarks/recovery/recovery.py --fault stop --patience 60

Hoop, data parallel on devices of this machine, beside ``torchrun`` elastic with DDP over Gloo: MNIST by the MLP
784-128-64-10, global batch 256, SGD, 4 epochs, every process with one core, in turns. torchrun restarts every rank
from the last checkpoint, one every ``--every`` steps; Hoop's survivors finish the step they are in. Both train to the
end: samples are counted from each contender's own record of finished steps, and the final weights are compared with
those of the same contender without the fault.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
TORCH_TIMEOUT_S = 1800.0
Result = dict[str, Any]


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _write_data(folder: Path) -> None:
    """Write MNIST to files that torchrun's ranks can map."""
    from hoop.data.catalog import load

    train = load("mnist").train
    (folder / "images").write_bytes(train.images.tobytes())
    (folder / "labels").write_bytes(train.labels.astype("uint8").tobytes())


def _turn(contender: Callable[..., Result], ranks: int, options: argparse.Namespace) -> Result:
    """One turn with a fault; a contender that does not recover is a result as well."""
    try:
        return contender(ranks, FAULTS[options.fault], options.patience, options)
    except TimeoutError as error:
        return {"seconds": None, "said": str(error)}


def _row(name: str, ranks: int, turns: list[Result], timeout: float) -> str:
    done = [one for one in turns if one["seconds"] is not None]
    cells = [f"{name}, {ranks} ranks"]
    if done:
        times = sorted(one["seconds"] for one in done)
        cells += [f"{statistics.median(times):.2f}", f"{times[0]:.2f} to {times[-1]:.2f}"]
        cells += [_range(done, key) for key in ("steps_repeated", "samples_lost", "samples_repeated")]
        cells.append(f"{sum(one['equal'] for one in done)} of {len(done)}")
    else:
        cells += [f"not within {timeout:g}", *["–"] * 5]
    cells.append(f"{len(done)} of {len(turns)}")
    return f"| {' | '.join(cells)} |"


def _range(turns: list[Result], key: str) -> str:
    values = sorted(one[key] for one in turns)
    return f"{values[0]:,}" if values[0] == values[-1] else f"{values[0]:,} to {values[-1]:,}"


def _print(found: Mapping[int, Mapping[str, list[Result]]], timeout: float) -> None:
    print(
        "| | fault to the next finished step, s (median) | least to most | steps repeated | samples lost | ",
        end="",
    )
    print("samples repeated | weights as undisturbed | recovered |")
    print("|---" * 8 + "|")
    for ranks, by_name in found.items():
        for name, turns in by_name.items():
            print(_row(name, ranks, turns, timeout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3, help="of each contender")
    parser.add_argument("--ranks", default="2,4", help="how many; several with commas")
    parser.add_argument("--fault", choices=sorted(FAULTS), default="kill", help="SIGKILL or SIGSTOP")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for the next step")
    parser.add_argument("--every", type=int, default=100, help="steps between torchrun's checkpoints")
    parser.add_argument(
        "--gloo-timeout",
        type=float,
        default=TORCH_TIMEOUT_S,
        help="seconds that Gloo waits for a silent rank; PyTorch's own default is 1800",
    )
    parser.add_argument("--contenders", default="hoop,torchrun")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from on_torchrun import rank_main, torchrun

    if options.rank is not None:
        rank_main(options.rank, options.every, options.gloo_timeout)
        return
    from on_hoop import hoop

    contenders = {"hoop": hoop, "torchrun": torchrun}
    names = options.contenders.split(",")
    found: dict[int, dict[str, list[Result]]] = {}
    with tempfile.TemporaryDirectory() as options.data:
        _write_data(Path(options.data))
        for ranks in map(int, options.ranks.split(",")):
            undisturbed = {}
            for name in names:
                _log(f"{name}, {ranks} ranks, undisturbed …")
                undisturbed[name] = contenders[name](ranks, None, options.patience, options)
            found[ranks] = {name: [] for name in names}
            for turn in range(1, options.turns + 1):
                for name in names:
                    one = _turn(contenders[name], ranks, options)
                    if "weights" in one:
                        one["equal"] = one["weights"] == undisturbed[name]["weights"]
                    found[ranks][name].append(one)
                    _log(f"{name}, {ranks} ranks, turn {turn} of {options.turns}: {one}")
    if options.json:
        load = os.getloadavg()[0]
        print(json.dumps({"machine": platform.platform(), "load": load, "fault": options.fault, "ranks": found}))
    else:
        _print(found, options.patience)


if __name__ == "__main__":
    main()
