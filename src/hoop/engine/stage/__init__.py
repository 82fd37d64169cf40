"""The stages of a rank: their state, and how they are computed.

state               StageState: weights, gradients, totals and optimizer state of a stage, in the arena
autograd            losses, and forward and backward with autograd
linear_chain        forward and backward of chains of Linear and ReLU, without autograd
batched_shards      several shards of a rank as one batch
gpu                 stages on a GPU, CUDA graphs
gradient_reduction  all-reduce of gradients, clipping
optimizer           SGD, Adam, AdamW; learning-rate schedules
weight_versions     two versions of the weights, for steps that overlap
provenance          which device contributed which samples to an update
"""
