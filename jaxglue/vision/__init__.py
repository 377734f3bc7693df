"""Images of rows: read, resized and cut into patches as processors of models do; torch is not needed."""
