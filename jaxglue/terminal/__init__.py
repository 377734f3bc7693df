"""Everything that is printed: control characters stay visible."""
