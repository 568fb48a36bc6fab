"""Tasks that come with launcher."""
