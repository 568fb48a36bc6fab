"""`launcher top`: runs on a live screen, drawn by Textual, which no other package imports."""
