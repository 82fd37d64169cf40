"""What crosses the wire: the lab's messages, Hoop's own, and the frames of the data plane.

Nothing here imports gRPC but ``rpc``; rooms that must do without it import ``frames`` alone.
"""
