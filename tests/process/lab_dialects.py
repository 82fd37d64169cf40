"""The lab's protocol as other programs speak it, as tables; nothing here is generated from Hoop's gpu_sim.proto."""

from __future__ import annotations

from lab_cluster import lab

_REDUCE = "commId=1 uint64, count=2 uint64, op=3 ReduceOp, memAddrs=4 map MemAddr"
_DONE = "success=1 bool"
_DEVICE, _COORDINATOR = lab.SERVICES["GPUDevice"], lab.SERVICES["GPUCoordinator"]
_COPY = _COORDINATOR["Memcpy"]

STARTER = lab.Protocol(
    lab.ENUMS,
    {**lab.MESSAGES, "DataChunk": "data=1 bytes, streamId=2 StreamId"},
    {
        "GPUDevice": {**_DEVICE, "Memcpy": _COPY},
        "GPUCoordinator": {
            **_COORDINATOR,
            "AllReduce": (_REDUCE, _DONE),
            "CommRemoveDevice": ("commId=1 uint64, rank=2 Rank", _DONE),
        },
    },
)
"""The starter's numbers, with the calls and the field that public programs have added."""

NIL_FIRST = lab.Protocol(
    {"Status": "READY IN_PROGRESS SUCCESS FAILED", "ReduceOp": "NIL SUM PROD MIN MAX"},
    {
        **lab.MESSAGES,
        "DeviceMetadata": lab.MESSAGES["DeviceMetadata"] + ", ip=4 string, port=5 uint32, rank=6 Rank",
        "DataChunk": "data=1 bytes, streamId=2 StreamId, srcRank=3 Rank",
    },
    {
        "GPUDevice": {
            **_DEVICE,
            "BeginReceive": (_DEVICE["BeginReceive"][0] + ", op=5 ReduceOp", "initiated=1 bool"),
            "GetStreamStatus": ("streamId=1 StreamId, srcRank=2 Rank", "status=1 Status"),
            "Memcpy": _COPY,
            "SetupCommunication": ("rankToAddress=1 map string, rank=2 Rank", _DONE),
            "ResetGpu": ("", _DONE),
        },
        "GPUCoordinator": {
            rpc: _COORDINATOR[rpc]
            for rpc in ("CommInit", "GetCommStatus", "CommDestroy", "GroupStart", "GroupEnd", "AllReduceRing", "Memcpy")
        },
    },
)
"""The dialect of the repository of the paper dsml."""
