"""Render templates and values to files, strict about undefined names and quoting."""
