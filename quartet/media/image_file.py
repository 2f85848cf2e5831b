"""Picture files: their size without decoding, and their pixels, from bytes that may be made to do harm.

PNG, JPEG, WebP and GIF, recognized by content. What counts is one picture: the first frame of an animation, the first
picture of a JPEG with several.

The containers are walked by hand, so that a decoder gets only the picture itself. Metadata is where small hostile files
become large: entries of an EXIF directory may each name the whole file as their value, text chunks are compressed, a
JPEG may ask for a hundred thousand passes over all pixels. Of the metadata only EXIF's orientation is read, and none
that stands in XMP alone; Pillow gets a file with the chunks that pixels need. Every walk is bounded.

The formats: PNG third edition (w3.org/TR/png-3), JPEG ITU-T T.81 annex B with EXIF 2.32 for its APP1, GIF89a, and
WebP's RIFF (RFC 9649).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from PIL.GifImagePlugin import GifImageFile
from PIL.Image import Transpose
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from quartet.errors import InvalidMediaError, MediaTooLargeError

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

# The field that errors name.
_FIELD = "file"

# Not `Image.open`: it takes a JPEG with several pictures for another format, whose reader parses far more.
_READERS: dict[str, type[ImageFile]] = {
    "GIF": GifImageFile,
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
}
# By EXIF's numbers. `ImageOps.exif_transpose`, which transformers uses, has the same, but asks XMP where EXIF has none.
_TRANSPOSES = {
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}
_FIRST_ORIENTATION_ON_ITS_SIDE = 5

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_EXIF_PREFIX = b"Exif\0\0"
# Far above what any encoder writes, and walked in tens of milliseconds.
_MAX_CHUNKS = 65_536
_MAX_JPEG_SEGMENTS = 4_096
# Progressive encoders write about ten; each is a pass over all pixels, of 8k in a tenth of a second.
_MAX_JPEG_SCANS = 32
# Bytes between segments, which decoders step over one by one.
_MAX_JPEG_JUNK_BYTES = 65_536
_SOS, _EOI = b"\xff\xda", b"\xff\xd9"


@dataclass(frozen=True)
class ImageHeader:
    """What a picture's file says before any pixel is decoded.

    Attributes:
        format: ``PNG``, ``JPEG``, ``WEBP`` or ``GIF``.
        width: in pixels, after the EXIF orientation is applied.
        height: in pixels, after the EXIF orientation is applied.
    """

    format: str
    width: int
    height: int


def read_header(data: bytes, *, max_pixels: int) -> ImageHeader:
    """The header of a picture's file; a file that passes may still turn out to be damaged in its pixels.

    Raises:
        InvalidMediaError: of another format, damaged or cut short. ``field`` is ``file``.
        MediaTooLargeError: more than ``max_pixels``. ``field`` is ``file``.
    """
    container = _checked_container(data, max_pixels)
    _open(container)
    width, height = container.width, container.height
    if container.orientation >= _FIRST_ORIENTATION_ON_ITS_SIDE:
        width, height = height, width
    return ImageHeader(container.format, width, height)


def decode(data: bytes, *, max_pixels: int) -> Image:
    """The picture as RGB, of the size that ``read_header`` gives. Transparent pixels have the colour stored below.

    Raises:
        InvalidMediaError: of another format, damaged or cut short. ``field`` is ``file``.
        MediaTooLargeError: more than ``max_pixels``. ``field`` is ``file``.
    """
    container = _checked_container(data, max_pixels)
    image = _open(container)
    try:
        # Rotate first, as transformers' loader does; `convert` loads a lazy image, and so does `transpose`.
        transpose = _TRANSPOSES.get(container.orientation)
        return (image if transpose is None else image.transpose(transpose)).convert("RGB")
    except Exception as error:  # decoders may raise any type on hostile bytes
        raise _undecodable() from error


def _checked_container(data: bytes, max_pixels: int) -> _Container:
    container = _read_container(data)
    if container.width < 1 or container.height < 1:
        raise InvalidMediaError("the picture has no pixels", field=_FIELD)
    if container.width * container.height > max_pixels:
        raise MediaTooLargeError(
            f"{container.width} x {container.height} pixels are more than the {max_pixels} allowed",
            field=_FIELD,
        )
    return container


def _open(container: _Container) -> ImageFile:
    """The lazy image. Only libwebp allocates the pixels here already; their number was checked."""
    try:
        image = _READERS[container.format](io.BytesIO(container.bare))
    except Exception as error:  # decoders may raise any type on hostile bytes
        raise _undecodable() from error
    if image.size != (container.width, container.height):
        raise InvalidMediaError("the picture contradicts itself about its size", field=_FIELD)
    return image


def _undecodable() -> InvalidMediaError:
    return InvalidMediaError("the picture cannot be decoded", field=_FIELD)


@dataclass(frozen=True)
class _Container:
    """What a file says of its picture.

    Attributes:
        format: ``PNG``, ``JPEG``, ``GIF`` or ``WEBP``.
        width: in pixels, as stored.
        height: in pixels, as stored.
        orientation: EXIF's, from 1 (as stored) to 8.
        bare: the file without metadata.
    """

    format: str
    width: int
    height: int
    orientation: int
    bare: bytes = field(repr=False)


def _read_container(data: bytes) -> _Container:
    """The container of a file of any of the four formats, recognised by its content.

    Raises:
        InvalidMediaError: it has another format, ends too early, or no encoder builds such a file.
    """
    try:
        if data.startswith(_PNG_SIGNATURE):
            return _read_png(data)
        if data.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if data.startswith((b"GIF87a", b"GIF89a")):
            return _read_gif(data)
        if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            return _read_webp(data)
    except (struct.error, IndexError) as error:
        raise _damaged() from error
    raise InvalidMediaError("the file is no PNG, JPEG, WebP or GIF picture", field=_FIELD)


def _read_png(data: bytes) -> _Container:
    kept = [_PNG_SIGNATURE]
    orientation = 1
    for name, begin, end in _png_chunks(data):
        if name in _PNG_KEPT:
            kept.append(data[begin:end])
        elif name == b"eXIf":
            orientation = _orientation(data[begin + 8 : end - 4])
    if kept[1][4:8] != b"IHDR":
        raise _damaged()
    width, height = struct.unpack_from(">II", kept[1], 8)
    return _Container("PNG", width, height, orientation, b"".join(kept))


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Name, begin and end of every chunk, up to the one that ends the picture."""
    offset = len(_PNG_SIGNATURE)
    for _ in range(_MAX_CHUNKS):
        length, name = struct.unpack_from(">I4s", data, offset)
        end = offset + 12 + length
        if end > len(data):
            raise _damaged()
        yield name, offset, end
        if name == b"IEND":
            return
        offset = end
    raise _strange()


def _read_jpeg(data: bytes) -> _Container:
    kept = [b"\xff\xd8"]
    exif = b""
    size: tuple[int, int] | None = None
    for marker, begin, end in _jpeg_segments(data):
        if marker == 0xE1 and data.startswith(_EXIF_PREFIX, begin + 4):
            exif = exif or data[begin + 4 : end]
        # APP0 and APP14 say how colours are stored; the other APP segments and comments are metadata.
        if not 0xE1 <= marker <= 0xED and marker not in (0xEF, 0xFE):
            kept.append(data[begin:end])
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, begin + 5)
            size = width, height
        if marker == _SOS[1]:
            kept.append(_jpeg_scans(data, end))
    if size is None:
        raise _damaged()
    return _Container("JPEG", *size, _orientation(exif), b"".join(kept))


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, begin and end of every segment, up to the first that is followed by pixels."""
    offset, num_junk_bytes = 2, 0
    for _ in range(_MAX_JPEG_SEGMENTS):
        begin = data.find(b"\xff", offset)
        # A marker may be filled up with any number of leading ff.
        while begin >= 0 and data[begin + 1] in (0x00, 0xFF) and num_junk_bytes <= _MAX_JPEG_JUNK_BYTES:
            num_junk_bytes += 1
            begin = data.find(b"\xff", begin + 1)
        if begin < 0:
            raise _damaged()
        num_junk_bytes += begin - offset
        if num_junk_bytes > _MAX_JPEG_JUNK_BYTES:
            raise _strange()
        marker = data[begin + 1]
        if 0xD0 <= marker <= 0xD9:  # stands alone
            offset = begin + 2
            continue
        (length,) = struct.unpack_from(">H", data, begin + 2)
        offset = begin + 2 + length
        if length < 2 or offset > len(data):
            raise _damaged()
        yield marker, begin, offset
        if marker == _SOS[1]:
            return
    raise _strange()


def _jpeg_scans(data: bytes, begin: int) -> bytes:
    """The pixels, up to the end of the first picture: behind it some cameras put further ones, or a film."""
    end = data.find(_EOI, begin)
    end = len(data) if end < 0 else end + len(_EOI)
    # Among pixels ff da is nothing but the marker: an ff of theirs is followed by a zero.
    if data.count(_SOS, begin, end) >= _MAX_JPEG_SCANS:
        raise _strange()
    return data[begin:end]


def _read_gif(data: bytes) -> _Container:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    offset = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    kept = [data[:offset]]
    control = b""
    for _ in range(_MAX_CHUNKS):
        if data[offset] == 0x2C:
            left, top, frame_width, frame_height = struct.unpack_from("<4H", data, offset + 1)
            kept += [control, data[offset:]]
            # A first frame that sticks out makes the picture larger, as in Pillow.
            size = max(width, left + frame_width), max(height, top + frame_height)
            return _Container("GIF", *size, 1, b"".join(kept))
        if data[offset] != 0x21:
            raise _damaged()
        end = _gif_blocks_end(data, offset + 2)
        if data[offset + 1] == 0xF9:  # how the next frame is shown: its transparent colour is given there
            control = data[offset:end]
        offset = end
    raise _strange()


def _gif_blocks_end(data: bytes, offset: int) -> int:
    for _ in range(_MAX_CHUNKS):
        length = data[offset]
        offset += 1 + length
        if length == 0:
            return offset
    raise _strange()


def _read_webp(data: bytes) -> _Container:
    kind, body = data[12:16], 20
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(data[body + at : body + at + 3], "little") for at in (4, 7))
    elif kind == b"VP8L" and data[body] == 0x2F:
        (bits,) = struct.unpack_from("<I", data, body + 1)
        width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    elif kind == b"VP8 " and data[body + 3 : body + 6] == b"\x9d\x01\x2a":
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, body + 6))
    else:
        raise _damaged()
    # Pillow hands the whole file to libwebp, which leaves metadata alone.
    return _Container("WEBP", width, height, _orientation(_webp_exif(data)), data)


def _webp_exif(data: bytes) -> bytes:
    offset = 12
    for _ in range(_MAX_CHUNKS):
        if offset + 8 > len(data):
            return b""
        name, length = struct.unpack_from("<4sI", data, offset)
        if name == b"EXIF":
            return data[offset + 8 : offset + 8 + length]
        offset += 8 + length + length % 2
    raise _strange()


def _orientation(exif: bytes) -> int:
    """The orientation in an EXIF block, a TIFF file; 1 where it is missing, impossible or damaged."""
    tiff = exif.removeprefix(_EXIF_PREFIX)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(f"{order}I", tiff, 4)
        (num_entries,) = struct.unpack_from(f"{order}H", tiff, directory)
        for index in range(num_entries):
            tag, kind, count, value = struct.unpack_from(f"{order}HHIH", tiff, directory + 2 + 12 * index)
            if (tag, kind, count) == (0x0112, 3, 1):
                return value if 1 <= value <= 8 else 1
    except struct.error:
        return 1
    return 1


def _damaged() -> InvalidMediaError:
    return InvalidMediaError("the picture is damaged, or ends too early", field=_FIELD)


def _strange() -> InvalidMediaError:
    return InvalidMediaError("the picture has more pieces than any encoder writes", field=_FIELD)
