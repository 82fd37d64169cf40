"""The options of ``hoop.Ray``, which need no Ray."""

from __future__ import annotations

from typing import Any

import pytest

import hoop
from hoop.errors import InvalidArgument
from hoop.launch.ray_cluster import Ray


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices: 0 is not a number of devices in 1.."),
        ({"devices": True}, "devices: True is not a number of devices"),
        ({"devices": 4, "elastic": (5, 8)}, "devices: 4 is not in elastic, 5 to 8"),
        ({"elastic": 4}, r"elastic: 4 is not \(least, most\), such as"),
        ({"elastic": (8, 4)}, r"elastic: \(8, 4\) is not \(least, most\): 8 is above 4"),
        ({"elastic": (0, 4)}, "elastic: 0 is not a number of devices"),
        ({"cpus": -1}, "cpus: -1 is not a number of at least 0"),
        ({"gpus": "one"}, "gpus: 'one' is not a number of at least 0"),
        ({"cpus": 0}, "cpus, gpus: both are 0"),
        ({"placement": "near"}, "placement: 'near' is not one of pack, spread, strict_pack, strict_spread"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Ray(**options)


def test_the_number_of_devices() -> None:
    assert [(one.least, one.start, one.most) for one in (Ray(devices=8), Ray(devices=8, elastic=(4, 16)))] == [
        (8, 8, 8),
        (4, 8, 16),
    ]
    assert Ray(elastic=(4, 16)).start == 4


def test_a_bundle_has_what_a_device_needs() -> None:
    assert Ray(cpus=2, gpus=0.5).bundle == {"CPU": 2.0, "GPU": 0.5}
    assert Ray(cpus=0, gpus=1).bundle == {"GPU": 1.0}


def test_on_takes_nothing_else() -> None:
    with pytest.raises(InvalidArgument, match="on: 7 is neither the address of a coordinator"):
        hoop.train("mnist", on=7)  # type: ignore[arg-type]
