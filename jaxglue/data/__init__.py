"""From files of examples to packed batches."""
