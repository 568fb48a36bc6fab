"""Data: which samples a rank trains on in each step (`data`), fetching them (`loading`), the task's data sets
(`feed`), and a check of ranks that must have the same samples (`same_samples`)."""
