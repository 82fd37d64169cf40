"""What crosses the wire: .proto files and generated code, frames of the data plane, gRPC servers and channels, tokens,
certificates and roles.
A call's meaning is the servers' business.

May import: nothing but the modules directly in hoop.
"""

PUBLIC = (
    "auth",
    "channels",
    "frames",
    "job_settings",
    "repeated_calls",
    "roles",
    "service",
    "tokens",
)
"""Modules that other rooms may import."""
