"""torch.compile on each block (`compiling`), and what torch gets wrong in compiled blocks (the others)."""
