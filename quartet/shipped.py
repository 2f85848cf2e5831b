"""What ships beside the code: topologies and engine files (``configs``), and the tiny model (``models/tiny``).

In a checkout they are folders at its top. An installed wheel has them in the package (``tools/build_data.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_IN_WHEEL = Path(__file__).resolve().parent / "_data"

#: The folder with ``configs`` and ``models/tiny``.
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).resolve().parents[1]

#: The folder with the topologies.
CONFIGS = ROOT / "configs"

_FOLDERS = (Path("configs"), Path("models/tiny"))

# Below ``CONFIGS``; the other folders there hold no topologies.
_OF_TOPOLOGIES = ("", "gpu", "trtllm")


def topologies() -> Mapping[str, Path]:
    """The files of the shipped topologies by name, such as ``disagg`` and ``trtllm/disagg``, in the order of a list."""
    files = [file for folder in _OF_TOPOLOGIES for file in sorted((CONFIGS / folder).glob("*.yaml"))]
    return {file.relative_to(CONFIGS).with_suffix("").as_posix(): file for file in files}


def find_shipped(path: str) -> str:
    """The shipped file or folder that ``path`` names, else ``path``.

    A path names one if it is relative to ``ROOT``, as ``models/tiny/checkpoint``, and the working directory has none.
    """
    relative = Path(path)
    is_named = any(relative.is_relative_to(folder) for folder in _FOLDERS) and ".." not in relative.parts
    if not is_named or relative.exists():
        return path
    shipped = ROOT / relative
    return str(shipped) if shipped.exists() else path
