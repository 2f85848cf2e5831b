"""Picture files: their size without decoding, and their pixels, from bytes that may be made to do harm.

PNG, JPEG, WebP and GIF, told by content. What counts is one picture: the first frame of an animation, the first
picture of a JPEG with several.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL.GifImagePlugin import GifImageFile
from PIL.Image import Transpose
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from quartet.errors import InvalidMediaError, MediaTooLargeError
from quartet.media.image_container import FIELD, Container, read_container

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

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
    """The picture as RGB, of the size that ``read_header`` tells. Transparent pixels have the colour stored below.

    Raises:
        InvalidMediaError: of another format, damaged or cut short. ``field`` is ``file``.
        MediaTooLargeError: more than ``max_pixels``. ``field`` is ``file``.
    """
    container = _checked_container(data, max_pixels)
    image = _open(container)
    try:
        # Rotated first, as transformers' loader does it, too; `convert` loads a lazy image, and so does `transpose`.
        transpose = _TRANSPOSES.get(container.orientation)
        return (image if transpose is None else image.transpose(transpose)).convert("RGB")
    except Exception as error:  # what decoders raise on hostile bytes is of every type
        raise _undecodable() from error


def _checked_container(data: bytes, max_pixels: int) -> Container:
    container = read_container(data)
    if container.width < 1 or container.height < 1:
        raise InvalidMediaError("the picture has no pixels", field=FIELD)
    if container.width * container.height > max_pixels:
        raise MediaTooLargeError(
            f"{container.width} x {container.height} pixels are more than the {max_pixels} allowed",
            field=FIELD,
        )
    return container


def _open(container: Container) -> ImageFile:
    """The lazy image. libwebp alone makes room for the pixels already, which are no more than was checked."""
    try:
        image = _READERS[container.format](io.BytesIO(container.bare))
    except Exception as error:  # what decoders raise on hostile bytes is of every type
        raise _undecodable() from error
    if image.size != (container.width, container.height):
        raise InvalidMediaError("the picture contradicts itself about its size", field=FIELD)
    return image


def _undecodable() -> InvalidMediaError:
    return InvalidMediaError("the picture cannot be decoded", field=FIELD)
