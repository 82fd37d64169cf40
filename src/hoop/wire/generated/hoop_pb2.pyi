from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Location(_message.Message):
    __slots__ = ("address", "buffer", "offset")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    address: int
    buffer: str
    offset: int
    def __init__(self, address: _Optional[int] = ..., buffer: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class Buffer(_message.Message):
    __slots__ = ("name", "address", "bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: int
    bytes: int
    def __init__(self, name: _Optional[str] = ..., address: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("capacity", "used", "buffers", "gpu")
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    capacity: int
    used: int
    buffers: int
    gpu: GpuMemory
    def __init__(self, capacity: _Optional[int] = ..., used: _Optional[int] = ..., buffers: _Optional[int] = ..., gpu: _Optional[_Union[GpuMemory, _Mapping]] = ...) -> None: ...

class GpuMemory(_message.Message):
    __slots__ = ("name", "total", "free", "capacity", "used", "buffers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    USED_FIELD_NUMBER: _ClassVar[int]
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    total: int
    free: int
    capacity: int
    used: int
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    def __init__(self, name: _Optional[str] = ..., total: _Optional[int] = ..., free: _Optional[int] = ..., capacity: _Optional[int] = ..., used: _Optional[int] = ..., buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ...) -> None: ...

class DeviceDescription(_message.Message):
    __slots__ = ("device_id", "address", "data_address", "min_address", "max_address", "host", "pid", "incarnation", "shared_address", "keeps_memory", "hoop_version", "torch_version", "python_version", "gpu", "processor", "process")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MAX_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARED_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    HOOP_VERSION_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_VERSION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    device_id: int
    address: str
    data_address: str
    min_address: int
    max_address: int
    host: str
    pid: int
    incarnation: str
    shared_address: str
    keeps_memory: bool
    hoop_version: str
    torch_version: str
    python_version: str
    gpu: str
    processor: str
    process: str
    def __init__(self, device_id: _Optional[int] = ..., address: _Optional[str] = ..., data_address: _Optional[str] = ..., min_address: _Optional[int] = ..., max_address: _Optional[int] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., incarnation: _Optional[str] = ..., shared_address: _Optional[str] = ..., keeps_memory: bool = ..., hoop_version: _Optional[str] = ..., torch_version: _Optional[str] = ..., python_version: _Optional[str] = ..., gpu: _Optional[str] = ..., processor: _Optional[str] = ..., process: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("device", "memory", "open_streams", "tasks", "time")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    OPEN_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDescription
    memory: DeviceMemory
    open_streams: int
    tasks: _containers.RepeatedCompositeFieldContainer[TaskDescription]
    time: float
    def __init__(self, device: _Optional[_Union[DeviceDescription, _Mapping]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., open_streams: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[TaskDescription, _Mapping]]] = ..., time: _Optional[float] = ...) -> None: ...

class TaskDescription(_message.Message):
    __slots__ = ("job_id", "generation", "links")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    generation: int
    links: _containers.RepeatedCompositeFieldContainer[LinkDescription]
    def __init__(self, job_id: _Optional[int] = ..., generation: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkDescription, _Mapping]]] = ...) -> None: ...

class LinkDescription(_message.Message):
    __slots__ = ("communicator_id", "generation", "device_id", "sent", "received")
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    communicator_id: int
    generation: int
    device_id: int
    sent: int
    received: int
    def __init__(self, communicator_id: _Optional[int] = ..., generation: _Optional[int] = ..., device_id: _Optional[int] = ..., sent: _Optional[int] = ..., received: _Optional[int] = ...) -> None: ...

class AllocateRequest(_message.Message):
    __slots__ = ("name", "bytes", "alignment", "reuse", "call_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    alignment: int
    reuse: bool
    call_id: str
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., alignment: _Optional[int] = ..., reuse: bool = ..., call_id: _Optional[str] = ...) -> None: ...

class AllocateResponse(_message.Message):
    __slots__ = ("buffer",)
    BUFFER_FIELD_NUMBER: _ClassVar[int]
    buffer: Buffer
    def __init__(self, buffer: _Optional[_Union[Buffer, _Mapping]] = ...) -> None: ...

class FreeRequest(_message.Message):
    __slots__ = ("name", "call_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    call_id: str
    def __init__(self, name: _Optional[str] = ..., call_id: _Optional[str] = ...) -> None: ...

class FreeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBuffersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBuffersResponse(_message.Message):
    __slots__ = ("buffers",)
    BUFFERS_FIELD_NUMBER: _ClassVar[int]
    buffers: _containers.RepeatedCompositeFieldContainer[Buffer]
    def __init__(self, buffers: _Optional[_Iterable[_Union[Buffer, _Mapping]]] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("location", "data", "ordered")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    location: Location
    data: bytes
    ordered: bool
    def __init__(self, location: _Optional[_Union[Location, _Mapping]] = ..., data: _Optional[bytes] = ..., ordered: bool = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("location", "bytes", "ordered")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    ORDERED_FIELD_NUMBER: _ClassVar[int]
    location: Location
    bytes: int
    ordered: bool
    def __init__(self, location: _Optional[_Union[Location, _Mapping]] = ..., bytes: _Optional[int] = ..., ordered: bool = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class RankAssignment(_message.Message):
    __slots__ = ("communicator_id", "generation", "rank", "members")
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    communicator_id: int
    generation: int
    rank: int
    members: _containers.RepeatedCompositeFieldContainer[DeviceDescription]
    def __init__(self, communicator_id: _Optional[int] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., members: _Optional[_Iterable[_Union[DeviceDescription, _Mapping]]] = ...) -> None: ...

class AssignRankRequest(_message.Message):
    __slots__ = ("assignment",)
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    assignment: RankAssignment
    def __init__(self, assignment: _Optional[_Union[RankAssignment, _Mapping]] = ...) -> None: ...

class AssignRankResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Operation(_message.Message):
    __slots__ = ("collective", "algorithm", "dtype", "op", "count", "root", "peer", "chunk_bytes", "compression")
    COLLECTIVE_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    collective: str
    algorithm: str
    dtype: str
    op: str
    count: int
    root: int
    peer: int
    chunk_bytes: int
    compression: str
    def __init__(self, collective: _Optional[str] = ..., algorithm: _Optional[str] = ..., dtype: _Optional[str] = ..., op: _Optional[str] = ..., count: _Optional[int] = ..., root: _Optional[int] = ..., peer: _Optional[int] = ..., chunk_bytes: _Optional[int] = ..., compression: _Optional[str] = ...) -> None: ...

class Operand(_message.Message):
    __slots__ = ("source", "destination")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    source: Location
    destination: Location
    def __init__(self, source: _Optional[_Union[Location, _Mapping]] = ..., destination: _Optional[_Union[Location, _Mapping]] = ...) -> None: ...

class MemoryRange(_message.Message):
    __slots__ = ("location", "bytes", "writes")
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITES_FIELD_NUMBER: _ClassVar[int]
    location: Location
    bytes: int
    writes: bool
    def __init__(self, location: _Optional[_Union[Location, _Mapping]] = ..., bytes: _Optional[int] = ..., writes: bool = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("reservation_id", "ranges", "timeout_s", "what")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[MemoryRange]
    timeout_s: float
    what: str
    def __init__(self, reservation_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[MemoryRange, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., what: _Optional[str] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaunchRequest(_message.Message):
    __slots__ = ("assignment", "operations", "timeout_s", "release", "reservation_id", "call_id")
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    assignment: RankAssignment
    operations: _containers.RepeatedCompositeFieldContainer[LaunchOperation]
    timeout_s: float
    release: bool
    reservation_id: int
    call_id: str
    def __init__(self, assignment: _Optional[_Union[RankAssignment, _Mapping]] = ..., operations: _Optional[_Iterable[_Union[LaunchOperation, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., release: bool = ..., reservation_id: _Optional[int] = ..., call_id: _Optional[str] = ...) -> None: ...

class LaunchOperation(_message.Message):
    __slots__ = ("operation", "operand", "round")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    OPERAND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    operand: Operand
    round: int
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., operand: _Optional[_Union[Operand, _Mapping]] = ..., round: _Optional[int] = ...) -> None: ...

class LaunchResponse(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[OperationReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[OperationReport, _Mapping]]] = ...) -> None: ...

class OperationReport(_message.Message):
    __slots__ = ("seconds", "messages_sent", "bytes_sent", "algorithm")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    messages_sent: int
    bytes_sent: int
    algorithm: str
    def __init__(self, seconds: _Optional[float] = ..., messages_sent: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., algorithm: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("communicator_id", "generation", "reason", "lost_device")
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LOST_DEVICE_FIELD_NUMBER: _ClassVar[int]
    communicator_id: int
    generation: int
    reason: str
    lost_device: int
    def __init__(self, communicator_id: _Optional[int] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., lost_device: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartTaskRequest(_message.Message):
    __slots__ = ("job_id", "assignment", "settings", "resume", "joining", "run", "future_ranks", "call_id", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    FUTURE_RANKS_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    assignment: RankAssignment
    settings: str
    resume: str
    joining: bool
    run: str
    future_ranks: int
    call_id: str
    generation: int
    def __init__(self, job_id: _Optional[int] = ..., assignment: _Optional[_Union[RankAssignment, _Mapping]] = ..., settings: _Optional[str] = ..., resume: _Optional[str] = ..., joining: bool = ..., run: _Optional[str] = ..., future_ranks: _Optional[int] = ..., call_id: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StartTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReassignTaskRequest(_message.Message):
    __slots__ = ("job_id", "assignment", "planned", "final", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    assignment: RankAssignment
    planned: bool
    final: bool
    generation: int
    def __init__(self, job_id: _Optional[int] = ..., assignment: _Optional[_Union[RankAssignment, _Mapping]] = ..., planned: bool = ..., final: bool = ..., generation: _Optional[int] = ...) -> None: ...

class ReassignTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitReassignmentRequest(_message.Message):
    __slots__ = ("job_id", "generation")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    generation: int
    def __init__(self, job_id: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class CommitReassignmentResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTaskRequest(_message.Message):
    __slots__ = ("job_id", "after")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    after: int
    def __init__(self, job_id: _Optional[int] = ..., after: _Optional[int] = ...) -> None: ...

class StopTaskRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class StopTaskResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceTaskRequest(_message.Message):
    __slots__ = ("job_id", "steps", "timeout_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    steps: int
    timeout_s: float
    def __init__(self, job_id: _Optional[int] = ..., steps: _Optional[int] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class TraceTaskResponse(_message.Message):
    __slots__ = ("rank", "first_step", "steps", "spans")
    RANK_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    first_step: int
    steps: int
    spans: _containers.RepeatedCompositeFieldContainer[TraceSpan]
    def __init__(self, rank: _Optional[int] = ..., first_step: _Optional[int] = ..., steps: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[TraceSpan, _Mapping]]] = ...) -> None: ...

class TraceSpan(_message.Message):
    __slots__ = ("instruction", "category", "start", "seconds")
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    CATEGORY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    instruction: str
    category: str
    start: float
    seconds: float
    def __init__(self, instruction: _Optional[str] = ..., category: _Optional[str] = ..., start: _Optional[float] = ..., seconds: _Optional[float] = ...) -> None: ...

class CheckLinksRequest(_message.Message):
    __slots__ = ("data_addresses", "addresses")
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, data_addresses: _Optional[_Iterable[str]] = ..., addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class CheckLinksResponse(_message.Message):
    __slots__ = ("failures", "answers")
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    failures: _containers.RepeatedScalarFieldContainer[str]
    answers: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, failures: _Optional[_Iterable[str]] = ..., answers: _Optional[_Iterable[bool]] = ...) -> None: ...

class ExamineRequest(_message.Message):
    __slots__ = ("job", "devices")
    JOB_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    job: str
    devices: int
    def __init__(self, job: _Optional[str] = ..., devices: _Optional[int] = ...) -> None: ...

class ExamineResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class JobEvent(_message.Message):
    __slots__ = ("sequence", "time", "rank", "kind", "json", "device_id", "origin")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: float
    rank: int
    kind: str
    json: str
    device_id: int
    origin: str
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[float] = ..., rank: _Optional[int] = ..., kind: _Optional[str] = ..., json: _Optional[str] = ..., device_id: _Optional[int] = ..., origin: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("device",)
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDescription
    def __init__(self, device: _Optional[_Union[DeviceDescription, _Mapping]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("device_id", "heartbeat_s", "lease_s")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    device_id: int
    heartbeat_s: float
    lease_s: float
    def __init__(self, device_id: _Optional[int] = ..., heartbeat_s: _Optional[float] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("device_id", "incarnation", "memory", "stalls", "activities")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    STALLS_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    device_id: int
    incarnation: str
    memory: DeviceMemory
    stalls: _containers.RepeatedCompositeFieldContainer[Stall]
    activities: _containers.RepeatedCompositeFieldContainer[TaskActivity]
    def __init__(self, device_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., stalls: _Optional[_Iterable[_Union[Stall, _Mapping]]] = ..., activities: _Optional[_Iterable[_Union[TaskActivity, _Mapping]]] = ...) -> None: ...

class TaskActivity(_message.Message):
    __slots__ = ("job_id", "generation", "rank", "at_s", "steps", "load_s", "forward_s", "backward_s", "communicate_s", "update_s", "idle_s", "bytes_sent", "shards", "stages", "links")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    LOAD_S_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_S_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATE_S_FIELD_NUMBER: _ClassVar[int]
    UPDATE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    generation: int
    rank: int
    at_s: float
    steps: int
    load_s: float
    forward_s: float
    backward_s: float
    communicate_s: float
    update_s: float
    idle_s: float
    bytes_sent: int
    shards: _containers.RepeatedScalarFieldContainer[int]
    stages: _containers.RepeatedScalarFieldContainer[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkDescription]
    def __init__(self, job_id: _Optional[int] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., at_s: _Optional[float] = ..., steps: _Optional[int] = ..., load_s: _Optional[float] = ..., forward_s: _Optional[float] = ..., backward_s: _Optional[float] = ..., communicate_s: _Optional[float] = ..., update_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., shards: _Optional[_Iterable[int]] = ..., stages: _Optional[_Iterable[int]] = ..., links: _Optional[_Iterable[_Union[LinkDescription, _Mapping]]] = ...) -> None: ...

class Stall(_message.Message):
    __slots__ = ("job_id", "communicator_id", "generation", "device_ids", "connecting")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    CONNECTING_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    communicator_id: int
    generation: int
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    connecting: bool
    def __init__(self, job_id: _Optional[int] = ..., communicator_id: _Optional[int] = ..., generation: _Optional[int] = ..., device_ids: _Optional[_Iterable[int]] = ..., connecting: bool = ...) -> None: ...

class HeartbeatAnswer(_message.Message):
    __slots__ = ("known", "leave", "exit_code")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    known: bool
    leave: bool
    exit_code: int
    def __init__(self, known: bool = ..., leave: bool = ..., exit_code: _Optional[int] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("device_id", "incarnation", "planned")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    device_id: int
    incarnation: str
    planned: bool
    def __init__(self, device_id: _Optional[int] = ..., incarnation: _Optional[str] = ..., planned: bool = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ("waits_for",)
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    waits_for: str
    def __init__(self, waits_for: _Optional[str] = ...) -> None: ...

class DrainDeviceRequest(_message.Message):
    __slots__ = ("device_id", "timeout_s", "exit_code")
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    device_id: int
    timeout_s: float
    exit_code: int
    def __init__(self, device_id: _Optional[int] = ..., timeout_s: _Optional[float] = ..., exit_code: _Optional[int] = ...) -> None: ...

class DrainProgress(_message.Message):
    __slots__ = ("stage", "job_id", "device_ids", "seconds", "text")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    stage: str
    job_id: int
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    seconds: float
    text: str
    def __init__(self, stage: _Optional[str] = ..., job_id: _Optional[int] = ..., device_ids: _Optional[_Iterable[int]] = ..., seconds: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("address", "pid", "devices", "communicators", "jobs", "time", "hoop_version", "lease_s")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATORS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    HOOP_VERSION_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    address: str
    pid: int
    devices: _containers.RepeatedCompositeFieldContainer[Member]
    communicators: _containers.RepeatedCompositeFieldContainer[Communicator]
    jobs: _containers.RepeatedCompositeFieldContainer[Job]
    time: float
    hoop_version: str
    lease_s: float
    def __init__(self, address: _Optional[str] = ..., pid: _Optional[int] = ..., devices: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., communicators: _Optional[_Iterable[_Union[Communicator, _Mapping]]] = ..., jobs: _Optional[_Iterable[_Union[Job, _Mapping]]] = ..., time: _Optional[float] = ..., hoop_version: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class Job(_message.Message):
    __slots__ = ("id", "settings", "device_ids", "status", "reason", "name", "min_devices", "max_devices")
    ID_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MIN_DEVICES_FIELD_NUMBER: _ClassVar[int]
    MAX_DEVICES_FIELD_NUMBER: _ClassVar[int]
    id: int
    settings: str
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    status: str
    reason: str
    name: str
    min_devices: int
    max_devices: int
    def __init__(self, id: _Optional[int] = ..., settings: _Optional[str] = ..., device_ids: _Optional[_Iterable[int]] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ..., name: _Optional[str] = ..., min_devices: _Optional[int] = ..., max_devices: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("device", "state", "reason", "memory", "silent_s", "unreachable", "left_out", "activities")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SILENT_S_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    ACTIVITIES_FIELD_NUMBER: _ClassVar[int]
    device: DeviceDescription
    state: str
    reason: str
    memory: DeviceMemory
    silent_s: float
    unreachable: str
    left_out: bool
    activities: _containers.RepeatedCompositeFieldContainer[TaskActivity]
    def __init__(self, device: _Optional[_Union[DeviceDescription, _Mapping]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., silent_s: _Optional[float] = ..., unreachable: _Optional[str] = ..., left_out: bool = ..., activities: _Optional[_Iterable[_Union[TaskActivity, _Mapping]]] = ...) -> None: ...

class Communicator(_message.Message):
    __slots__ = ("id", "generation", "members", "status", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    members: _containers.RepeatedCompositeFieldContainer[DeviceDescription]
    status: str
    reason: str
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., members: _Optional[_Iterable[_Union[DeviceDescription, _Mapping]]] = ..., status: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ExamineHostsRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ExamineHostsResponse(_message.Message):
    __slots__ = ("hosts",)
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedCompositeFieldContainer[HostExamination]
    def __init__(self, hosts: _Optional[_Iterable[_Union[HostExamination, _Mapping]]] = ...) -> None: ...

class HostExamination(_message.Message):
    __slots__ = ("host", "device_ids", "json", "failure", "clock_ahead_s", "clock_error_s")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_ERROR_S_FIELD_NUMBER: _ClassVar[int]
    host: str
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    json: str
    failure: str
    clock_ahead_s: float
    clock_error_s: float
    def __init__(self, host: _Optional[str] = ..., device_ids: _Optional[_Iterable[int]] = ..., json: _Optional[str] = ..., failure: _Optional[str] = ..., clock_ahead_s: _Optional[float] = ..., clock_error_s: _Optional[float] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("after", "follow")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    def __init__(self, after: _Optional[int] = ..., follow: bool = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "time", "kind", "text", "fields")
    class FieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    time: float
    kind: str
    text: str
    fields: _containers.ScalarMap[str, str]
    def __init__(self, sequence: _Optional[int] = ..., time: _Optional[float] = ..., kind: _Optional[str] = ..., text: _Optional[str] = ..., fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class KeepSessionRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class KeepSessionAnswer(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreateCommunicatorRequest(_message.Message):
    __slots__ = ("devices", "device_ids", "session", "call_id")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    devices: int
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    session: str
    call_id: str
    def __init__(self, devices: _Optional[int] = ..., device_ids: _Optional[_Iterable[int]] = ..., session: _Optional[str] = ..., call_id: _Optional[str] = ...) -> None: ...

class GetCommunicatorRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class RebuildCommunicatorRequest(_message.Message):
    __slots__ = ("id", "call_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    call_id: str
    def __init__(self, id: _Optional[int] = ..., call_id: _Optional[str] = ...) -> None: ...

class DestroyCommunicatorRequest(_message.Message):
    __slots__ = ("id", "call_id")
    ID_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    call_id: str
    def __init__(self, id: _Optional[int] = ..., call_id: _Optional[str] = ...) -> None: ...

class DestroyCommunicatorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommunicatorResponse(_message.Message):
    __slots__ = ("communicator",)
    COMMUNICATOR_FIELD_NUMBER: _ClassVar[int]
    communicator: Communicator
    def __init__(self, communicator: _Optional[_Union[Communicator, _Mapping]] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("communicator_id", "operations", "timeout_s", "call_id")
    COMMUNICATOR_ID_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    communicator_id: int
    operations: _containers.RepeatedCompositeFieldContainer[RunOperation]
    timeout_s: float
    call_id: str
    def __init__(self, communicator_id: _Optional[int] = ..., operations: _Optional[_Iterable[_Union[RunOperation, _Mapping]]] = ..., timeout_s: _Optional[float] = ..., call_id: _Optional[str] = ...) -> None: ...

class RunOperation(_message.Message):
    __slots__ = ("operation", "operands", "driver")
    class OperandsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: Operand
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[Operand, _Mapping]] = ...) -> None: ...
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    OPERANDS_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    operation: Operation
    operands: _containers.MessageMap[int, Operand]
    driver: str
    def __init__(self, operation: _Optional[_Union[Operation, _Mapping]] = ..., operands: _Optional[_Mapping[int, Operand]] = ..., driver: _Optional[str] = ...) -> None: ...

class RunResponse(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[OperationReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[OperationReport, _Mapping]]] = ...) -> None: ...

class CopyRequest(_message.Message):
    __slots__ = ("source_device", "source", "destination_device", "destination", "bytes")
    SOURCE_DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    source_device: int
    source: Location
    destination_device: int
    destination: Location
    bytes: int
    def __init__(self, source_device: _Optional[int] = ..., source: _Optional[_Union[Location, _Mapping]] = ..., destination_device: _Optional[int] = ..., destination: _Optional[_Union[Location, _Mapping]] = ..., bytes: _Optional[int] = ...) -> None: ...

class CopyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StartJobRequest(_message.Message):
    __slots__ = ("settings", "device_ids", "resume", "call_id")
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    settings: str
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    resume: str
    call_id: str
    def __init__(self, settings: _Optional[str] = ..., device_ids: _Optional[_Iterable[int]] = ..., resume: _Optional[str] = ..., call_id: _Optional[str] = ...) -> None: ...

class StartJobResponse(_message.Message):
    __slots__ = ("job_id", "device_ids")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_IDS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    device_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job_id: _Optional[int] = ..., device_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WatchJobRequest(_message.Message):
    __slots__ = ("job_id", "after", "interval_s")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    after: int
    interval_s: float
    def __init__(self, job_id: _Optional[int] = ..., after: _Optional[int] = ..., interval_s: _Optional[float] = ...) -> None: ...

class GetJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class GetJobResponse(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: Job
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ...) -> None: ...

class StopJobRequest(_message.Message):
    __slots__ = ("job_id",)
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    def __init__(self, job_id: _Optional[int] = ...) -> None: ...

class StopJobResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
