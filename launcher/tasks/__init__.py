"""Tasks that are part of launcher."""
