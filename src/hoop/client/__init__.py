"""The Python client: a cluster, its communicators, buffers on its devices, collectives between them."""
