"""What an instruction counts as, in accounts of time, traces and pictures: the engine's and the simulator's alike."""

from __future__ import annotations

from hoop.plan.instructions import Kind

COMPUTE, COMMUNICATE, IDLE = "compute", "communicate", "idle"
CATEGORY = {
    Kind.LOAD: "load",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
    Kind.UPDATE: "update",
    Kind.REDUCE: "reduce",
    Kind.SEND_OUTPUT: "send",
    Kind.SEND_GRADIENT: "send",
    Kind.PUSH: "push",
    Kind.GIVE: "send",
    Kind.RECV_INPUT: "wait",
    Kind.RECV_GRADIENT: "wait",
    Kind.GET: "wait",
    Kind.TAKE: "wait",
}
"""Each kind's category; a receive is waiting, and what is copied once it has come is ``recv``."""
SHARE = {
    "load": COMPUTE,
    "forward": COMPUTE,
    "backward": COMPUTE,
    "update": COMPUTE,
    "reduce": COMMUNICATE,
    "send": COMMUNICATE,
    "push": COMMUNICATE,
    "recv": COMMUNICATE,
    "wait": IDLE,
}
"""Which share of a device's time each category belongs to."""
