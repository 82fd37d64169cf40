"""Training with the user's own batches, losses and optimizers, data parallel.

``engine/stage`` trains float32 models on pairs of tensors, with all weights in one flat vector and a fused update. This
package trains everything else: a batch of any structure, a loss of the model and the batch, any ``torch.optim``
optimizer and learning-rate scheduler, weights of any floating type.

loss          calls the user's loss, and finds out how the losses of shards make up the loss of a batch
objects       the model, its optimizer, its scheduler and the average of its weights, on one rank
state         the bytes of these objects in the arena, and the gradients of shards
feed          the batches of a step, prefetched by worker processes
evaluation    loss and metrics on the test data
setup         builds all of it for a rank
own_loop      a user's own training loop, in a thread of its own

``roles/custom.py`` runs the steps. Recovery is that of data parallel training: ranks finish the same step.
"""
