"""Text generation: sampling, cached decoding, chat."""
