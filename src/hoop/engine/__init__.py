"""Training: one rank executes its part of a plan, with weights, gradients and optimizer state in the arena.

    entrypoint         what a device runs for a job
    trainer            the training loop of one rank
    setup, executor    builds, and executes, the instructions of a step
    stage/             what a rank computes and keeps of the model
    roles/             how a rank runs a step: data parallel, pipeline, GPU-resident, sharded update, ring, parameter
                       server, standby, custom
    custom/            the user's own batches, losses and optimizers
    fault_tolerance/   replication, recovery, checkpoints, state in the arena, fault injection

Servers and gRPC are unknown here.

May import: memory native transport collectives membership models data plan strategies.
"""

PUBLIC = (
    "cost_probe",
    "custom.evaluation",
    "custom.feed",
    "custom.loss",
    "custom.objects",
    "custom.own_loop",
    "custom.setup",
    "custom.state",
    "data_feed",
    "entrypoint",
    "evaluation",
    "gradient_slots",
    "fault_tolerance.checkpoint_format",
    "fault_tolerance.checkpoint_header",
    "job",
    "job_names",
    "job_source",
    "loss_reduction",
    "loss_trial",
    "numeric_probe",
    "recipes",
    "settings",
    "stage.autograd",
    "stage.provenance",
    "step_schedule",
    "trainer",
    "user_code",
)
"""Modules that other rooms may import."""
