"""Which activations a layer keeps, sends to the host or recomputes, and the executor that runs the layers."""
