"""Pack vLLM for a machine with a Hopper GPU and torch 2.11 that has no network and takes files piece by piece.

    python benchmarks/peers/pack_vllm.py .vllm --mebibytes 40     # .vllm/1, .vllm/2, …: pieces and join.sh
    bash .vllm/2/join.sh /tmp/vllm                                # there, after each arrived: the last one joins all
    python benchmarks/serve_peers.py --vllm-path /tmp/vllm/site

vLLM 0.24.0 is the newest that takes torch 2.11. What decoding on one Hopper GPU does not load stays behind: the
FlashAttention 2 build (Hopper takes 3), other architectures' machine code (zeros in its place, so that offsets stay),
the Rust frontend, kernels and headers that are compiled for FP8 experts and Blackwell, and needs that are imported for
these alone (flashinfer, cutlass, tilelang, quack, humming): `engines.VLLM_ENVIRONMENT` says so to it, and sampling from
the whole vocabulary does not use them. Programs for sm_80 stay where a kernel has none for sm_90: the driver compiles
these.
"""

import argparse
import hashlib
import lzma
import math
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

VLLM = "vllm==0.24.0"
NEEDS = (
    *("annotated-types==0.8.0", "anthropic==2.14.0", "apache-tvm-ffi==0.1.15.post2", "astor==0.8.1", "blake3==1.0.11"),
    *("cachetools==8.0.2", "cbor2==6.3.0", "cloudpickle==3.1.3", "compressed-tensors==0.17.0", "depyf==0.20.0"),
    *("diskcache==5.6.3", "distro==1.9.0", "docstring-parser==0.18.0", "fastapi==0.136.3", "gguf==0.19.0"),
    *("httpcore2==2.16.2", "httptools==0.9.0", "httpx-sse==0.4.3", "httpx2==2.16.2", "ijson==3.6.0", "jiter==0.19.0"),
    *("jmespath==1.1.0", "jsonschema==4.26.0", "jsonschema-specifications==2025.9.1", "lark==1.3.1"),
    *("llguidance==1.7.6", "loguru==0.7.3", "mcp==2.3.0", "mistral-common==1.13.1"),
    *("model-hosting-container-standards==0.1.16", "msgspec==0.23.0", "openai==3.57.0", "openai-harmony==0.0.8"),
    *("opentelemetry-api==1.45.2", "opentelemetry-sdk==1.45.2", "opentelemetry-semantic-conventions==0.66b2"),
    *("opentelemetry-semantic-conventions-ai==0.5.1", "partial-json-parser==0.2.1.1.post7"),
    *("prometheus-fastapi-instrumentator==8.1.0", "pybase64==1.5.1", "pycountry==26.2.16", "pydantic==2.14.4"),
    *("pydantic-core==2.50.5", "pydantic-extra-types==2.11.1", "pydantic-settings==2.16.3", "python-dotenv==1.2.4"),
    *("python-json-logger==4.2.0", "python-multipart==0.0.34", "pyzmq==27.3.0", "referencing==0.37.0"),
    *("rpds-py==2026.9.1", "setproctitle==1.3.8", "sniffio==1.3.1", "sse-starlette==3.7.0", "starlette==1.10.0"),
    *("supervisor==4.3.0", "truststore==0.10.5", "typing-inspection==0.4.5", "uvicorn==0.54.0", "watchfiles==1.3.0"),
    *("websockets==17.4", "xgrammar==0.2.9"),
)
"""What it imports that an image with torch, transformers, JAX and aiohttp lacks; each a wheel."""
TAGS = "manylinux_2_31", "manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux1"
LEFT_OUT = (
    *("vllm/vllm-rs", "vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/_qutlass_C", "vllm/_flashmla", "vllm/benchmarks/"),
    *("vllm/third_party/deep_gemm/", "vllm/third_party/fmha_sm100/", "vllm/entrypoints/serve/instrumentator/static/"),
    *("pycountry/locales/", "mistral_common/data/"),
)
"""Beginnings of paths."""
_CONTAINER, _ELF, _PTX, _HOPPER = 0xBA55ED50, 2, 1, 90
_JOIN = """\
#!/usr/bin/env bash
# Keeps this piece in the given folder; once all are there, joins and unpacks them into its site/.
set -euo pipefail
mkdir -p "$1" && cp "$(dirname "$0")"/piece-* "$1"/
[ "$(ls "$1"/piece-* | wc -l)" = {pieces} ] || {{ ls "$1"; exit 0; }}
cat "$1"/piece-* > "$1/all.tar.xz" && echo "{digest}  $1/all.tar.xz" | sha256sum -c
mkdir -p "$1/site" && tar xJf "$1/all.tar.xz" -C "$1/site" && rm "$1/all.tar.xz" && du -sh "$1/site"
"""


class Program(NamedTuple):
    """A kernel's program inside a library's fat binary."""

    kind: int
    """ELF or PTX."""
    architecture: int
    begin: int
    size: int


def containers(library: bytes) -> Iterator[list[Program]]:
    """Yield the programs of each of a library's fat binaries: those of one, a driver chooses from."""
    key, place = struct.pack("<I", _CONTAINER), 0
    while (place := library.find(key, place)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", library, place)
        if version != 1 or header != 16 or place + header + size > len(library):
            place += 4
            continue
        entry, end, found = place + header, place + header + size, []
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            found.append(Program(kind, architecture, entry + header, size))
            entry += header + size
        yield found
        place = end


def for_hopper(library: bytes) -> bytes:
    """Return a library with zeros for the programs that a driver does not choose on Hopper."""
    kept = bytearray(library)
    for programs in containers(library):
        own = {each for each in programs if each.kind == _ELF and each.architecture == _HOPPER}
        for each in programs:
            is_compiled = each.kind == _PTX and each.architecture <= _HOPPER and not own
            if each not in own and not is_compiled:
                kept[each.begin : each.begin + each.size] = bytes(each.size)
    return bytes(kept)


def download(folder: Path) -> list[Path]:
    """Fetch all wheels, without what they need beyond the list."""
    platforms = [word for tag in TAGS for word in ("--platform", f"{tag}_x86_64")]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(folder), VLLM, *NEEDS]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheel: Path, site: Path) -> None:
    """Unpack what is kept of a wheel."""
    with zipfile.ZipFile(wheel) as packed:
        for name in packed.namelist():
            if name.endswith("/") or name.startswith(LEFT_OUT):
                continue
            content = packed.read(name)
            path = site / name.partition(".data/purelib/")[2] if ".data/purelib/" in name else site / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(for_hopper(content) if name.startswith("vllm/") and name.endswith(".so") else content)


def cut(archive: Path, folder: Path, most: int) -> int:
    """Cut an archive into pieces of at most `most` bytes, each in a folder with join.sh; return their number."""
    content = archive.read_bytes()
    pieces = math.ceil(len(content) / most)
    join = _JOIN.format(pieces=pieces, digest=hashlib.sha256(content).hexdigest())
    for number in range(pieces):
        place = folder / str(number + 1)
        place.mkdir(parents=True)
        (place / f"piece-{number + 1:02}").write_bytes(content[number * most : (number + 1) * most])
        (place / "join.sh").write_text(join)
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mebibytes", type=float, default=55, help="most of a piece")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that were fetched before")
    args = parser.parse_args()
    if args.folder.exists():
        shutil.rmtree(args.folder)
    with tempfile.TemporaryDirectory() as scratch:
        site, archive = Path(scratch) / "site", Path(scratch) / "all.tar.xz"
        wheels = sorted(args.wheels.glob("*.whl")) if args.wheels else download(Path(scratch) / "wheels")
        for wheel in wheels:
            unpack(wheel, site)
        with (
            lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as file,
            tarfile.open(fileobj=file, mode="w") as packed,
        ):
            packed.add(site, arcname=".")
        pieces = cut(archive, args.folder, int(args.mebibytes * 2**20))
        print(f"{len(wheels)} wheels, {archive.stat().st_size / 2**20:.1f} MiB in {pieces} pieces")


if __name__ == "__main__":
    main()
