"""Templates and values become files, strict about undefined names and quoting."""
