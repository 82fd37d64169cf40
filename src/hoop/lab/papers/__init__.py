"""The experiments of five papers, run again: one file a paper."""
