#!/usr/bin/env python3
"""Makes crc32.ptx from crc32.cu. Needs Linux on x86-64 and no GPU:

    python3 -m venv /tmp/nvrtc && /tmp/nvrtc/bin/pip install nvidia-cuda-nvrtc-cu12==12.0.140
    /tmp/nvrtc/bin/python crates/forebay-device/kernels/build.py            # writes crc32.ptx
    /tmp/nvrtc/bin/python crates/forebay-device/kernels/build.py --check    # fails when another one would be written

The compiler is the one of CUDA 12.0 on purpose: a newer one writes a newer PTX ISA, which the drivers of 12.0 (525, the
oldest that Forebay works with) refuse. The target is the oldest that current drivers translate.
"""

import ctypes
import hashlib
import pathlib
import sys

TARGET = "compute_75"
COMPILER = (12, 0)
OPTIONS = [f"--gpu-architecture={TARGET}", "--std=c++14"]

FOLDER = pathlib.Path(__file__).resolve().parent
SOURCE = FOLDER / "crc32.cu"
OUTPUT = FOLDER / "crc32.ptx"


def compiler():
    """NVRTC, from the wheel that is installed beside this interpreter."""
    for folder in sys.path:
        path = pathlib.Path(folder, "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.12")
        if path.is_file():
            library = ctypes.CDLL(str(path))
            version = (ctypes.c_int(), ctypes.c_int())
            library.nvrtcVersion(ctypes.byref(version[0]), ctypes.byref(version[1]))
            found = (version[0].value, version[1].value)
            if found != COMPILER:
                sys.exit(f"NVRTC {found} found, {COMPILER} is needed: see the head of this file")
            return library
    sys.exit("NVRTC is not installed: see the head of this file")


def text_of(program, size_of, copy):
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    copy(program, text)
    return text.value.decode()


def compile_source(source):
    library = compiler()
    program = ctypes.c_void_p()
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None
    )
    if created != 0:
        sys.exit(f"nvrtcCreateProgram: {created}")
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    status = library.nvrtcCompileProgram(program, len(OPTIONS), options)
    log = text_of(program, library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog)
    if log.strip():
        print(log, file=sys.stderr)
    if status != 0:
        sys.exit(f"nvrtcCompileProgram: {status}")
    return text_of(program, library.nvrtcGetPTXSize, library.nvrtcGetPTX)


def main():
    source = SOURCE.read_bytes()
    body = compile_source(source)
    head = (
        f"// Made from {SOURCE.name} by build.py with NVRTC {COMPILER[0]}.{COMPILER[1]} "
        f"({' '.join(OPTIONS)}). Do not edit.\n"
        f"// source-sha256: {hashlib.sha256(source).hexdigest()}\n"
    )
    made = (head + body.rstrip() + "\n").encode()
    if sys.argv[1:] == ["--check"]:
        if made != OUTPUT.read_bytes():
            sys.exit(f"{OUTPUT.name} is not what {SOURCE.name} gives: run {pathlib.Path(__file__).name}")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        OUTPUT.write_bytes(made)


if __name__ == "__main__":
    main()
