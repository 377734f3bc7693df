"""Doors to a loaded model: OpenAI's HTTP interface, chats in a terminal, rows of files, tasks of a harness."""
