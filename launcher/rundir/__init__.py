"""The run directory: its layout and how its files are written.

The content of the files is defined elsewhere.
"""
