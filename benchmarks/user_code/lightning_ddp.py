"""Lightning with DDP: python lightning_ddp.py"""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    inputs = torch.randn(3000, 20)
    targets = (inputs @ torch.randn(20, 5)).argmax(1)
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    loader = torch.utils.data.DataLoader(dataset, batch_size=50, shuffle=True)
    module = Classifier()
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        callbacks=[ModelCheckpoint("lightning_ddp", save_last=True)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader, ckpt_path="last")
    if trainer.is_global_zero:
        print(f"accuracy {(module.model(inputs).argmax(1) == targets).float().mean():.3f}")
