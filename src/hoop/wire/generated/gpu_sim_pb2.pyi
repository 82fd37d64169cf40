from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_PROGRESS: _ClassVar[Status]
    SUCCESS: _ClassVar[Status]
    FAILED: _ClassVar[Status]

class ReduceOp(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SUM: _ClassVar[ReduceOp]
    PROD: _ClassVar[ReduceOp]
    MIN: _ClassVar[ReduceOp]
    MAX: _ClassVar[ReduceOp]
    AVG: _ClassVar[ReduceOp]
IN_PROGRESS: Status
SUCCESS: Status
FAILED: Status
SUM: ReduceOp
PROD: ReduceOp
MIN: ReduceOp
MAX: ReduceOp
AVG: ReduceOp

class DeviceId(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class MemAddr(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class StreamId(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("value",)
    VALUE_FIELD_NUMBER: _ClassVar[int]
    value: int
    def __init__(self, value: _Optional[int] = ...) -> None: ...

class DeviceMetadata(_message.Message):
    __slots__ = ("deviceId", "minMemAddr", "maxMemAddr", "ip", "port", "rank")
    DEVICEID_FIELD_NUMBER: _ClassVar[int]
    MINMEMADDR_FIELD_NUMBER: _ClassVar[int]
    MAXMEMADDR_FIELD_NUMBER: _ClassVar[int]
    IP_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    deviceId: DeviceId
    minMemAddr: MemAddr
    maxMemAddr: MemAddr
    ip: str
    port: int
    rank: Rank
    def __init__(self, deviceId: _Optional[_Union[DeviceId, _Mapping]] = ..., minMemAddr: _Optional[_Union[MemAddr, _Mapping]] = ..., maxMemAddr: _Optional[_Union[MemAddr, _Mapping]] = ..., ip: _Optional[str] = ..., port: _Optional[int] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ...) -> None: ...

class GetDeviceMetadataRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDeviceMetadataResponse(_message.Message):
    __slots__ = ("metadata",)
    METADATA_FIELD_NUMBER: _ClassVar[int]
    metadata: DeviceMetadata
    def __init__(self, metadata: _Optional[_Union[DeviceMetadata, _Mapping]] = ...) -> None: ...

class BeginSendRequest(_message.Message):
    __slots__ = ("sendBuffAddr", "numBytes", "dstRank", "commId")
    SENDBUFFADDR_FIELD_NUMBER: _ClassVar[int]
    NUMBYTES_FIELD_NUMBER: _ClassVar[int]
    DSTRANK_FIELD_NUMBER: _ClassVar[int]
    COMMID_FIELD_NUMBER: _ClassVar[int]
    sendBuffAddr: MemAddr
    numBytes: int
    dstRank: Rank
    commId: int
    def __init__(self, sendBuffAddr: _Optional[_Union[MemAddr, _Mapping]] = ..., numBytes: _Optional[int] = ..., dstRank: _Optional[_Union[Rank, _Mapping]] = ..., commId: _Optional[int] = ...) -> None: ...

class BeginSendResponse(_message.Message):
    __slots__ = ("initiated", "streamId")
    INITIATED_FIELD_NUMBER: _ClassVar[int]
    STREAMID_FIELD_NUMBER: _ClassVar[int]
    initiated: bool
    streamId: StreamId
    def __init__(self, initiated: bool = ..., streamId: _Optional[_Union[StreamId, _Mapping]] = ...) -> None: ...

class BeginReceiveRequest(_message.Message):
    __slots__ = ("streamId", "recvBuffAddr", "numBytes", "srcRank", "op")
    STREAMID_FIELD_NUMBER: _ClassVar[int]
    RECVBUFFADDR_FIELD_NUMBER: _ClassVar[int]
    NUMBYTES_FIELD_NUMBER: _ClassVar[int]
    SRCRANK_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    streamId: StreamId
    recvBuffAddr: MemAddr
    numBytes: int
    srcRank: Rank
    op: int
    def __init__(self, streamId: _Optional[_Union[StreamId, _Mapping]] = ..., recvBuffAddr: _Optional[_Union[MemAddr, _Mapping]] = ..., numBytes: _Optional[int] = ..., srcRank: _Optional[_Union[Rank, _Mapping]] = ..., op: _Optional[int] = ...) -> None: ...

class BeginReceiveResponse(_message.Message):
    __slots__ = ("initiated",)
    INITIATED_FIELD_NUMBER: _ClassVar[int]
    initiated: bool
    def __init__(self, initiated: bool = ...) -> None: ...

class DataChunk(_message.Message):
    __slots__ = ("data", "streamId", "srcRank", "hoopStreamId")
    DATA_FIELD_NUMBER: _ClassVar[int]
    STREAMID_FIELD_NUMBER: _ClassVar[int]
    SRCRANK_FIELD_NUMBER: _ClassVar[int]
    HOOPSTREAMID_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    streamId: StreamId
    srcRank: Rank
    hoopStreamId: StreamId
    def __init__(self, data: _Optional[bytes] = ..., streamId: _Optional[_Union[StreamId, _Mapping]] = ..., srcRank: _Optional[_Union[Rank, _Mapping]] = ..., hoopStreamId: _Optional[_Union[StreamId, _Mapping]] = ...) -> None: ...

class StreamSendResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class GetStreamStatusRequest(_message.Message):
    __slots__ = ("streamId", "srcRank")
    STREAMID_FIELD_NUMBER: _ClassVar[int]
    SRCRANK_FIELD_NUMBER: _ClassVar[int]
    streamId: StreamId
    srcRank: Rank
    def __init__(self, streamId: _Optional[_Union[StreamId, _Mapping]] = ..., srcRank: _Optional[_Union[Rank, _Mapping]] = ...) -> None: ...

class GetStreamStatusResponse(_message.Message):
    __slots__ = ("status", "reason")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    status: Status
    reason: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class SetupCommunicationRequest(_message.Message):
    __slots__ = ("rankToAddress", "rank")
    class RankToAddressEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: str
        def __init__(self, key: _Optional[int] = ..., value: _Optional[str] = ...) -> None: ...
    RANKTOADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    rankToAddress: _containers.ScalarMap[int, str]
    rank: Rank
    def __init__(self, rankToAddress: _Optional[_Mapping[int, str]] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ...) -> None: ...

class SetupCommunicationResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class ResetGpuRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetGpuResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class CommInitRequest(_message.Message):
    __slots__ = ("numDevices",)
    NUMDEVICES_FIELD_NUMBER: _ClassVar[int]
    numDevices: int
    def __init__(self, numDevices: _Optional[int] = ...) -> None: ...

class CommInitResponse(_message.Message):
    __slots__ = ("success", "commId", "devices")
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    COMMID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    success: bool
    commId: int
    devices: _containers.RepeatedCompositeFieldContainer[DeviceMetadata]
    def __init__(self, success: bool = ..., commId: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[DeviceMetadata, _Mapping]]] = ...) -> None: ...

class GetCommStatusRequest(_message.Message):
    __slots__ = ("commId",)
    COMMID_FIELD_NUMBER: _ClassVar[int]
    commId: int
    def __init__(self, commId: _Optional[int] = ...) -> None: ...

class GetCommStatusResponse(_message.Message):
    __slots__ = ("status", "reason")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    status: Status
    reason: str
    def __init__(self, status: _Optional[_Union[Status, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class GroupStartRequest(_message.Message):
    __slots__ = ("commId",)
    COMMID_FIELD_NUMBER: _ClassVar[int]
    commId: int
    def __init__(self, commId: _Optional[int] = ...) -> None: ...

class GroupStartResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class GroupEndRequest(_message.Message):
    __slots__ = ("commId",)
    COMMID_FIELD_NUMBER: _ClassVar[int]
    commId: int
    def __init__(self, commId: _Optional[int] = ...) -> None: ...

class GroupEndResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class AllReduceRingRequest(_message.Message):
    __slots__ = ("commId", "count", "op", "memAddrs")
    class MemAddrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: MemAddr
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[MemAddr, _Mapping]] = ...) -> None: ...
    COMMID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    MEMADDRS_FIELD_NUMBER: _ClassVar[int]
    commId: int
    count: int
    op: ReduceOp
    memAddrs: _containers.MessageMap[int, MemAddr]
    def __init__(self, commId: _Optional[int] = ..., count: _Optional[int] = ..., op: _Optional[_Union[ReduceOp, str]] = ..., memAddrs: _Optional[_Mapping[int, MemAddr]] = ...) -> None: ...

class AllReduceRingResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class NaiveAllReduceRequest(_message.Message):
    __slots__ = ("commId", "count", "op", "memAddrs")
    class MemAddrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: MemAddr
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[MemAddr, _Mapping]] = ...) -> None: ...
    COMMID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    MEMADDRS_FIELD_NUMBER: _ClassVar[int]
    commId: int
    count: int
    op: ReduceOp
    memAddrs: _containers.MessageMap[int, MemAddr]
    def __init__(self, commId: _Optional[int] = ..., count: _Optional[int] = ..., op: _Optional[_Union[ReduceOp, str]] = ..., memAddrs: _Optional[_Mapping[int, MemAddr]] = ...) -> None: ...

class NaiveAllReduceResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class AllReduceRequest(_message.Message):
    __slots__ = ("commId", "count", "op", "memAddrs")
    class MemAddrsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: MemAddr
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[MemAddr, _Mapping]] = ...) -> None: ...
    COMMID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    MEMADDRS_FIELD_NUMBER: _ClassVar[int]
    commId: int
    count: int
    op: ReduceOp
    memAddrs: _containers.MessageMap[int, MemAddr]
    def __init__(self, commId: _Optional[int] = ..., count: _Optional[int] = ..., op: _Optional[_Union[ReduceOp, str]] = ..., memAddrs: _Optional[_Mapping[int, MemAddr]] = ...) -> None: ...

class AllReduceResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class CommRemoveDeviceRequest(_message.Message):
    __slots__ = ("commId", "rank")
    COMMID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    commId: int
    rank: Rank
    def __init__(self, commId: _Optional[int] = ..., rank: _Optional[_Union[Rank, _Mapping]] = ...) -> None: ...

class CommRemoveDeviceResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class CommDestroyRequest(_message.Message):
    __slots__ = ("commId",)
    COMMID_FIELD_NUMBER: _ClassVar[int]
    commId: int
    def __init__(self, commId: _Optional[int] = ...) -> None: ...

class CommDestroyResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class CommFinalizeRequest(_message.Message):
    __slots__ = ("commId",)
    COMMID_FIELD_NUMBER: _ClassVar[int]
    commId: int
    def __init__(self, commId: _Optional[int] = ...) -> None: ...

class CommFinalizeResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class MemcpyHostToDeviceRequest(_message.Message):
    __slots__ = ("hostSrcData", "dstDeviceId", "dstMemAddr")
    HOSTSRCDATA_FIELD_NUMBER: _ClassVar[int]
    DSTDEVICEID_FIELD_NUMBER: _ClassVar[int]
    DSTMEMADDR_FIELD_NUMBER: _ClassVar[int]
    hostSrcData: bytes
    dstDeviceId: DeviceId
    dstMemAddr: MemAddr
    def __init__(self, hostSrcData: _Optional[bytes] = ..., dstDeviceId: _Optional[_Union[DeviceId, _Mapping]] = ..., dstMemAddr: _Optional[_Union[MemAddr, _Mapping]] = ...) -> None: ...

class MemcpyHostToDeviceResponse(_message.Message):
    __slots__ = ("success",)
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    success: bool
    def __init__(self, success: bool = ...) -> None: ...

class MemcpyDeviceToHostRequest(_message.Message):
    __slots__ = ("srcDeviceId", "srcMemAddr", "numBytes")
    SRCDEVICEID_FIELD_NUMBER: _ClassVar[int]
    SRCMEMADDR_FIELD_NUMBER: _ClassVar[int]
    NUMBYTES_FIELD_NUMBER: _ClassVar[int]
    srcDeviceId: DeviceId
    srcMemAddr: MemAddr
    numBytes: int
    def __init__(self, srcDeviceId: _Optional[_Union[DeviceId, _Mapping]] = ..., srcMemAddr: _Optional[_Union[MemAddr, _Mapping]] = ..., numBytes: _Optional[int] = ...) -> None: ...

class MemcpyDeviceToHostResponse(_message.Message):
    __slots__ = ("dstData",)
    DSTDATA_FIELD_NUMBER: _ClassVar[int]
    dstData: bytes
    def __init__(self, dstData: _Optional[bytes] = ...) -> None: ...

class MemcpyRequest(_message.Message):
    __slots__ = ("hostToDevice", "deviceToHost")
    HOSTTODEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICETOHOST_FIELD_NUMBER: _ClassVar[int]
    hostToDevice: MemcpyHostToDeviceRequest
    deviceToHost: MemcpyDeviceToHostRequest
    def __init__(self, hostToDevice: _Optional[_Union[MemcpyHostToDeviceRequest, _Mapping]] = ..., deviceToHost: _Optional[_Union[MemcpyDeviceToHostRequest, _Mapping]] = ...) -> None: ...

class MemcpyResponse(_message.Message):
    __slots__ = ("hostToDevice", "deviceToHost")
    HOSTTODEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICETOHOST_FIELD_NUMBER: _ClassVar[int]
    hostToDevice: MemcpyHostToDeviceResponse
    deviceToHost: MemcpyDeviceToHostResponse
    def __init__(self, hostToDevice: _Optional[_Union[MemcpyHostToDeviceResponse, _Mapping]] = ..., deviceToHost: _Optional[_Union[MemcpyDeviceToHostResponse, _Mapping]] = ...) -> None: ...
