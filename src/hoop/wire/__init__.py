"""What crosses the wire: the lab's messages, Hoop's own, the frames of the data plane; and who may send them.

Only ``rpc``, ``guard``, ``credentials`` and ``etcd`` import gRPC; rooms that must do without it import ``frames``
and ``tokens``.
"""
