"""How a run survives failures.

manager            sharded state: replicate, commit, reshard        (partitioned models)
replication        each rank's state at another rank, its holder
recovery           agree on a step, move state to where it is missing
local_persistence  state in the arena, for a device that is restarted on it
checkpoint_format  named tensors, checksums, the file format
snapshots          this rank's part of a checkpoint in the arena, for the client
state_slices       slices of named tensors: what the others store and move
fault_injector     faults for tests
"""
