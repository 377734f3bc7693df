"""Training on several GPUs: the mesh, what is split over it, and programs that run on each device."""
