"""Lightning over Hoop's collectives, by ``DDPStrategy(process_group_backend="hoop")``.

python examples/trainers/lightning_ddp.py    Lightning starts the second process itself
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, FEATURES, CLASSES = 512, 16, 4


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning's Trainer with Hoop's collectives.")
    parser.add_argument("--backend", default="hoop")
    parser.add_argument("--devices", type=int, default=2, help="processes")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="each rank writes the model to this folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy=DDPStrategy(process_group_backend=options.backend),  # the only line that names Hoop
        max_epochs=options.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset(), batch_size=32, shuffle=True))
    loss = float(trainer.callback_metrics["loss"])
    print(f"rank {trainer.global_rank} of {trainer.world_size} by {dist.get_backend()}: loss {loss:.4f}", flush=True)
    if options.out:
        save_file(model.state_dict(), options.out / f"rank-{trainer.global_rank}.safetensors")


if __name__ == "__main__":
    main()
