"""Choose a recipe: the valid recipes, the choice among them, and the ladder below it."""
