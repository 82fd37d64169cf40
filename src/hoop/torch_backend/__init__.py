"""The torch.distributed backend "hoop": process groups whose collectives and messages run over Hoop's links."""
