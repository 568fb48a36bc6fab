"""The memory that a recipe needs on the GPU and on the host."""
