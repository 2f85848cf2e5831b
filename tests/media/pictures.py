"""Picture files for tests, made by Pillow."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


def make_picture(width: int = 13, height: int = 7, mode: str = "RGB") -> Image.Image:
    """A picture in which no two corners are alike, so that every way of turning it shows."""
    pixels = bytes(
        (x * 19 + y * 31 + channel * 70) % 256 for y in range(height) for x in range(width) for channel in range(3)
    )
    return Image.frombytes("RGB", (width, height), pixels).convert(mode)


def encode(picture: Image.Image, format: str, **options: object) -> bytes:
    """The file."""
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def make_file(format: str = "PNG", width: int = 13, height: int = 7) -> bytes:
    """A small file of that format."""
    return encode(make_picture(width, height), format)


def orientation_exif(orientation: int) -> bytes:
    """An EXIF block with the orientation and nothing else."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def png_chunk(name: bytes, body: bytes) -> bytes:
    """The chunk with its length and checksum."""
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_header(width: int, height: int) -> bytes:
    """The beginning of a PNG file of that size: signature and IHDR."""
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def hostile_exif(num_entries: int, size_bytes: int) -> bytes:
    """A TIFF directory each of whose entries names the whole block as its value."""
    entries = b"".join(struct.pack("<HHII", 0xC000 + index, 7, size_bytes, 0) for index in range(num_entries))
    tiff = b"II*\0" + struct.pack("<IH", 8, num_entries) + entries
    return b"Exif\0\0" + tiff.ljust(size_bytes, b"\0")
