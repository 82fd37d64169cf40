"""The Python client: clusters, communicators, device buffers, collectives and jobs."""
