"""What crosses the wire: .proto files and generated code, frames of the data plane, gRPC servers and channels, local
sockets, tokens, certificates and roles.
A call's meaning is the servers' business.

May import: nothing but the modules directly in hoop.
"""

PUBLIC = (
    "auth",
    "certificates",
    "channels",
    "frames",
    "job_settings",
    "local_sockets",
    "private_files",
    "repeated_calls",
    "roles",
    "service",
    "tokens",
)
"""Modules that other rooms may import."""
