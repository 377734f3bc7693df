"""Readers of strangers' files, and the one way to write a file or folder."""
