"""Training on several GPUs: partition rules, collectives inside programs, and the mesh."""
