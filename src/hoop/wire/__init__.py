"""The wire formats: gRPC services, data-plane frames, and the authentication of both.

Only ``service``, ``auth`` and ``generated`` import gRPC or protobuf. Packages that must not load gRPC import
``frames``, ``tokens``, ``tls`` and ``roles``.
"""
