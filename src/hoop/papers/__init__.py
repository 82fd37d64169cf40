"""Five studies of distributed training, each run again: what it claims beside what comes out here."""
