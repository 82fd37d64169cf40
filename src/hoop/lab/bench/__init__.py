"""All-reduce beside Gloo and MPI, and the stress test of shared memory."""
