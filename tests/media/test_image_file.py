"""Sizes and pixels of picture files, and what hostile ones may cost."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from quartet.errors import InvalidMediaError, MediaTooLargeError
from quartet.media.image_file import ImageHeader, decode, read_header
from tests.media.pictures import (
    FORMATS,
    encode,
    hostile_exif,
    make_file,
    make_picture,
    orientation_exif,
    png_chunk,
    png_header,
)

MAX_PIXELS = 1_000_000
SMALL = {format: make_file(format) for format in FORMATS}


def as_transformers_loads_it(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def assert_loads_alike(data: bytes) -> None:
    ours, theirs = decode(data, max_pixels=MAX_PIXELS), as_transformers_loads_it(data)
    assert (ours.mode, ours.size) == ("RGB", theirs.size)
    assert ours.tobytes() == theirs.tobytes()
    header = read_header(data, max_pixels=MAX_PIXELS)
    assert (header.width, header.height) == ours.size


@pytest.fixture
def peak_bytes() -> Iterator[list[int]]:
    """Filled with the most memory that Python objects took since the test began, once the test reads it."""
    tracemalloc.start()
    yield [0]
    tracemalloc.stop()


@pytest.mark.parametrize("format", FORMATS)
def test_a_files_content_gives_its_format_and_size(format: str) -> None:
    assert read_header(SMALL[format], max_pixels=MAX_PIXELS) == ImageHeader(format, 13, 7)
    assert_loads_alike(SMALL[format])


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_pictures_are_turned_as_their_exif_says(format: str, orientation: int) -> None:
    data = encode(make_picture(), format, exif=orientation_exif(orientation))
    header = read_header(data, max_pixels=MAX_PIXELS)
    assert (header.width, header.height) == ((13, 7) if orientation < 5 else (7, 13))
    assert_loads_alike(data)


@pytest.mark.parametrize("format", ["JPEG", "WEBP"])
def test_an_orientation_that_stands_in_xmp_alone_is_left_alone(format: str) -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    data = encode(make_picture(), format, xmp=xmp)
    assert as_transformers_loads_it(data).size == (7, 13)
    assert read_header(data, max_pixels=MAX_PIXELS) == ImageHeader(format, 13, 7)
    assert decode(data, max_pixels=MAX_PIXELS).size == (13, 7)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_impossible_orientation_leaves_a_picture_as_it_is(orientation: int) -> None:
    assert_loads_alike(encode(make_picture(), "JPEG", exif=orientation_exif(orientation)))


@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0II*\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0nonsense"])
def test_a_damaged_exif_leaves_a_picture_as_it_is(exif: bytes) -> None:
    assert read_header(encode(make_picture(), "JPEG", exif=exif), max_pixels=MAX_PIXELS).width == 13


@pytest.mark.parametrize(
    ("format", "mode"),
    [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGBA", "I;16")]
    + [("JPEG", "L"), ("JPEG", "CMYK"), ("WEBP", "RGBA"), ("GIF", "P"), ("GIF", "L")],
)
def test_every_mode_becomes_rgb_as_pillow_does_it(format: str, mode: str) -> None:
    if mode == "I;16":
        picture = Image.frombytes(mode, (13, 7), bytes(range(182)))
    else:
        picture = make_picture(mode=mode)
    if mode in ("LA", "RGBA"):
        picture.putalpha(make_picture().convert("L"))
    assert_loads_alike(encode(picture, format, lossless=True))


def test_a_palette_with_transparent_entries_becomes_rgb_as_pillow_does_it() -> None:
    assert_loads_alike(encode(make_picture(mode="P"), "PNG", transparency=3))
    assert_loads_alike(encode(make_picture(mode="P"), "GIF", transparency=3, comment=b"seen first"))


@pytest.mark.parametrize("options", [{"progressive": True}, {"icc_profile": b"x" * 200_000, "comment": b"words"}])
def test_jpegs_of_every_build_are_read(options: dict[str, object]) -> None:
    assert_loads_alike(encode(make_picture(64, 48), "JPEG", dpi=(72, 72), **options))


def test_interlaced_and_16_bit_colour_pngs_are_read() -> None:
    raw = b"".join(b"\0" + bytes(range(6 * 4)) for _ in range(2))
    header = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 2, 16, 2, 0, 0, 0))
    assert_loads_alike(header + png_chunk(b"IDAT", zlib.compress(raw)) + png_chunk(b"IEND", b""))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_only_the_first_frame_of_an_animation_counts(format: str) -> None:
    later = [Image.new("RGB", (13, 7), (frame, 0, 0)) for frame in range(1, 40)]
    data = encode(
        make_picture(), format, save_all=True, append_images=later, **({"lossless": True} if format == "WEBP" else {})
    )
    assert read_header(data, max_pixels=MAX_PIXELS) == ImageHeader(format, 13, 7)
    assert_loads_alike(data)


def test_only_the_first_picture_of_a_jpeg_with_several_counts() -> None:
    data = encode(make_picture(), "MPO", save_all=True, append_images=[make_picture(20, 20)])
    assert Image.open(io.BytesIO(data)).format == "MPO"
    assert read_header(data, max_pixels=MAX_PIXELS) == ImageHeader("JPEG", 13, 7)
    assert_loads_alike(data)


def test_a_gif_frame_smaller_than_its_canvas_lies_on_what_is_transparent() -> None:
    data = bytearray(encode(make_picture().quantize(8), "GIF", transparency=3, comment=b"before the frame"))
    data[6:10] = struct.pack("<HH", 30, 20)
    assert read_header(bytes(data), max_pixels=MAX_PIXELS) == ImageHeader("GIF", 30, 20)
    assert_loads_alike(bytes(data))


def test_a_gif_frame_that_sticks_out_makes_the_picture_larger() -> None:
    data = bytearray(SMALL["GIF"])
    data[6:10] = struct.pack("<HH", 2, 2)
    assert read_header(bytes(data), max_pixels=MAX_PIXELS) == ImageHeader("GIF", 13, 7)
    assert_loads_alike(bytes(data))
    with pytest.raises(MediaTooLargeError):
        read_header(bytes(data), max_pixels=13 * 7 - 1)


@pytest.mark.parametrize("format", ["BMP", "TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_are_refused(format: str) -> None:
    with pytest.raises(InvalidMediaError, match="no PNG, JPEG, WebP or GIF") as caught:
        read_header(encode(make_picture(), format), max_pixels=MAX_PIXELS)
    assert caught.value.field == "file"


@pytest.mark.parametrize("format", FORMATS)
def test_more_pixels_than_allowed_are_refused_before_any_is_decoded(format: str) -> None:
    for read in (read_header, decode):
        assert read(SMALL[format], max_pixels=13 * 7)
        with pytest.raises(MediaTooLargeError, match="13 x 7") as caught:
            read(SMALL[format], max_pixels=13 * 7 - 1)
        assert caught.value.field == "file"


@pytest.mark.parametrize(
    "data",
    [
        png_header(2**31 - 1, 2**31 - 1) + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b""),
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b"," + struct.pack("<4HB", 0, 0, 1, 1, 0) + b"\2\0;",
        b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0" + b"\0" * 4 + b"\xff" * 6 + b"\0" * 8,
        b"\xff\xd8\xff\xc0\0\x0b\x08\xff\xff\xff\xff\x01\x01\x11\0\xff\xda\0\x08\x01\x01\0\0\x3f\0",
    ],
    ids=["PNG", "GIF", "WEBP", "JPEG"],
)
def test_bombs_are_refused_by_their_header(data: bytes) -> None:
    for read in (read_header, decode):
        with pytest.raises(MediaTooLargeError):
            read(data, max_pixels=33_177_600)


def test_a_picture_without_pixels_is_refused() -> None:
    data = png_header(0, 5) + png_chunk(b"IDAT", zlib.compress(b"")) + png_chunk(b"IEND", b"")
    with pytest.raises(InvalidMediaError, match="no pixels"):
        read_header(data, max_pixels=MAX_PIXELS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_an_exif_whose_entries_all_name_the_whole_block_costs_nothing(format: str, peak_bytes: list[int]) -> None:
    # Pillow would copy it once an entry: 2000 times 60 kB.
    data = encode(make_picture(), format, exif=hostile_exif(2_000, 60_000))
    tracemalloc.reset_peak()
    assert decode(data, max_pixels=MAX_PIXELS).size == (13, 7)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(data)


def test_compressed_text_of_a_png_is_never_unpacked(peak_bytes: list[int]) -> None:
    text = png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(900_000)))
    png = SMALL["PNG"]
    data = png[:33] + text * 50 + png[33:]
    tracemalloc.reset_peak()
    assert decode(data, max_pixels=MAX_PIXELS).size == (13, 7)
    assert tracemalloc.get_traced_memory()[1] < 1_000_000


def test_files_of_countless_pieces_are_refused() -> None:
    png, jpeg, gif = SMALL["PNG"], SMALL["JPEG"], SMALL["GIF"]
    first_frame = gif.index(b",", 13 + (3 << (gif[10] & 7) + 1) if gif[10] & 0x80 else 13)
    sos = jpeg.index(b"\xff\xda")
    begun = jpeg[:2] + b"\xff\xfe\0\2"
    pieces = {
        "chunks": png[:33] + png_chunk(b"teXt", b"") * 70_000 + png[33:],
        "segments": begun + b"\xff\xfe\0\2" * 5_000 + jpeg[2:],
        "junk": begun + bytes(70_000) + jpeg[2:],
        "filling": begun + b"\xff" * 70_000 + jpeg[2:],
        "restarts": begun + b"\xff\xd0" * 70_000 + jpeg[2:],
        "scans": jpeg[:-2] + jpeg[sos : sos + 14] * 200 + jpeg[-2:],
        "extensions": gif[:first_frame] + b"!\xfe\1x\0" * 70_000 + gif[first_frame:],
        "blocks": gif[:first_frame] + b"!\xfe" + b"\1x" * 70_000 + b"\0" + gif[first_frame:],
        "riff": SMALL["WEBP"] + b"JUNK\0\0\0\0" * 70_000,
    }
    for name, data in pieces.items():
        with pytest.raises(InvalidMediaError, match="more pieces"):
            pytest.fail(f"{name}: {read_header(data, max_pixels=MAX_PIXELS)}")


def test_bytes_after_a_jpeg_are_ignored() -> None:
    data = SMALL["JPEG"] + b"\xff\xda\0\2" * 500
    assert decode(data, max_pixels=MAX_PIXELS).tobytes() == decode(SMALL["JPEG"], max_pixels=MAX_PIXELS).tobytes()


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_cut_short_is_refused(format: str) -> None:
    data = encode(make_picture(40, 30), format)
    refused = 0
    for length in range(len(data) - 8):
        try:
            decode(data[:length], max_pixels=MAX_PIXELS)
        except InvalidMediaError as error:
            assert error.field == "file"
            refused += 1
    # The last bytes of a picture's file may be padding: of a JPEG or a GIF little more than the end marker is missed.
    assert refused > 0.9 * (len(data) - 8)


@given(data=st.data())
def test_changed_bytes_never_raise_anything_else(data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(FORMATS))
    file = bytearray(encode(make_picture(), format, exif=orientation_exif(6)) if format != "GIF" else SMALL[format])
    for _ in range(data.draw(st.integers(1, 8))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    for read in (read_header, decode):
        try:
            read(bytes(file), max_pixels=MAX_PIXELS)
        except (InvalidMediaError, MediaTooLargeError) as error:
            assert error.field == "file"


@given(
    beginning=st.sampled_from([b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a", b"RIFF\0\0\0\0WEBP", b""]),
    rest=st.binary(max_size=200),
)
def test_garbage_never_raises_anything_else(beginning: bytes, rest: bytes) -> None:
    for read in (read_header, decode):
        with pytest.raises((InvalidMediaError, MediaTooLargeError)):
            read(beginning + rest, max_pixels=MAX_PIXELS)
