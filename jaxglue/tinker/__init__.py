"""A server on this machine for loops of the `tinker` SDK, on sessions of this library."""
