"""The key that a launcher draws."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from quartet.streams.signed_start import SigningKeys
from services.topology.launch import draw_signing_key


def test_a_drawn_key_is_its_owners_alone_and_good_to_seal_with(tmp_path: Path) -> None:
    path = draw_signing_key(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = SigningKeys(path).signing_key
    assert len(key.secret) == 32
    assert key.secret.hex() not in repr(key)


def test_no_key_is_drawn_over_another(tmp_path: Path) -> None:
    content = draw_signing_key(tmp_path).read_text()
    with pytest.raises(FileExistsError):
        draw_signing_key(tmp_path)
    assert (tmp_path / "signing_keys").read_text() == content
