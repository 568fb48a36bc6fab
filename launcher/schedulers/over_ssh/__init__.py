"""A host without launcher: its commands, its files and the code that goes there, by plain OpenSSH."""
