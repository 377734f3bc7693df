# jaxglue with CUDA 13 from wheels: the host needs NVIDIA's driver (580 or newer) and its container toolkit. See docs/docker.md.
FROM python:3.12-slim

WORKDIR /opt/jaxglue
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[cuda13,gguf]'

# Models, data and runs are a mounted folder; caches are there too, so that they outlive the container.
WORKDIR /work
ENV HOME=/work
ENTRYPOINT ["jaxglue"]
CMD ["--help"]
