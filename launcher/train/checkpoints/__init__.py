"""Checkpoints: what is in one (`own`), where they lie (`folder`), writing (`writer`, `space`), reading
(`checkpoints`) and giving the weights away (`export`)."""
