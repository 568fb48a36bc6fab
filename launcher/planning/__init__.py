"""Which recipe: the valid ones, the choice, and the ladder below it."""
