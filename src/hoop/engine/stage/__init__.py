"""The stages of a rank: their state, and how they are computed.

state               StageState: weights, gradients, totals and optimizer state of a stage, in the arena
autograd            losses, and forward and backward with autograd
linear_chain        forward and backward of chains of Linear and ReLU, without autograd
batched_shards      several shards of a rank as one batch
gpu_stage           stages on a GPU, CUDA graphs; device_state: their state, with a copy in the arena
gpu_resident_step   a data parallel step on a GPU, as one CUDA graph; gpu_resident_state: its state
peer_rows           sums between GPUs, in the tree's order: peer_row_selection, exchanged_rows, device_reduction
peer_memory         memory of the GPUs of one host, mapped by its ranks
device_group        process groups of PyTorch for GPUs; nccl_group: NCCL, with Hoop's deadlines
accelerator         the GPU of a rank: selection, deterministic kernels
gradient_reduction  all-reduce of gradients, clipping
optimizer           SGD, Adam, AdamW on flat vectors
sharded_update      ranks that update one slice of the weights each (with weight_slices)
weight_versions     two versions of the weights, for steps that overlap
provenance          which device contributed which samples to an update
"""
