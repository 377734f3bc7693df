"""Training data: files of examples to packed batches."""
