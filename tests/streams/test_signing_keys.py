"""The file of keys: what is a key, and how keys change without a break."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from quartet.errors import ConfigError
from quartet.rpc import secret_file
from quartet.streams.signed_start import SigningKey, SigningKeys

OLD, NEW = "0a" * 32, "0b" * 32


@dataclass
class KeyFile:
    """A file of keys and a clock that only the test moves."""

    path: Path
    now: float = 0.0
    num_writes: int = field(default=0, init=False)

    def write(self, content: str, mode: int = 0o600) -> None:
        """Replace the file, at a time of its own."""
        new = self.path.with_suffix(".new")
        new.write_text(content)
        new.chmod(mode)
        self.num_writes += 1
        os.utime(new, ns=(self.num_writes, self.num_writes))
        new.rename(self.path)

    def keys(self) -> SigningKeys:
        return SigningKeys(self.path, clock=lambda: self.now)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys")


def test_the_first_key_signs_and_all_keys_are_found(file: KeyFile) -> None:
    file.write(f"# rotated on Monday\n\nnew {NEW}\nold  {OLD}\n")
    keys = file.keys()
    assert keys.signing_key == SigningKey(key_id="new", secret=bytes.fromhex(NEW))
    assert keys.find("old") == SigningKey(key_id="old", secret=bytes.fromhex(OLD))
    assert keys.find("other") is None


def test_a_mac_is_the_hmac_sha256_of_the_bytes() -> None:
    key = SigningKey(key_id="k", secret=b"s" * 32)
    assert key.mac(b"signed") == hmac.new(b"s" * 32, b"signed", hashlib.sha256).digest()


def test_keys_rotate_without_a_restart(file: KeyFile) -> None:
    file.write(f"old {OLD}")
    keys = file.keys()
    file.write(f"old {OLD}\nnew {NEW}")
    file.now = 0.9
    assert keys.signing_key.key_id == "old"
    assert keys.find("new") is not None
    file.now = 1.0
    assert keys.signing_key.key_id == "old"
    file.write(f"new {NEW}\nold {OLD}")
    file.now = 2.0
    assert keys.signing_key.key_id == "new"
    assert keys.find("old") is not None
    file.write(f"new {NEW}")
    file.now = 3.0
    assert keys.find("old") is None


def test_an_unknown_key_name_makes_the_file_be_polled_sooner_but_not_each_time(
    file: KeyFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write(f"old {OLD}")
    keys = file.keys()
    looks = []
    monkeypatch.setattr(
        secret_file, "file_signature", lambda path: looks.append(path) or secret_file._signature_of(path.stat())
    )
    for file.now in (0.01, 0.04, 0.06, 0.07, 0.1, 0.12):
        for _ in range(100):
            assert keys.find("made up") is None
    assert len(looks) == 2
    file.write(f"old {OLD}\nnew {NEW}")
    file.now = 0.18
    assert keys.find("old") is not None
    assert len(looks) == 2
    assert keys.find("new") is not None


@pytest.mark.parametrize("change", ["gone", "empty", "malformed", "open to everybody"])
def test_a_malformed_new_file_is_logged_and_the_old_keys_stay(
    file: KeyFile, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    file.write(f"old {OLD}")
    keys = file.keys()
    if change == "gone":
        file.path.unlink()
    else:
        contents = {"empty": "", "malformed": f"new {NEW[:-1]}x", "open to everybody": f"new {NEW}"}
        file.write(contents[change], mode=0o604 if change == "open to everybody" else 0o600)
    for now in (1.0, 2.0, 3.0):
        file.now = now
        assert keys.signing_key.key_id == "old"
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "signing_keys_file" in warning.getMessage()
    assert NEW[:40] not in caplog.text
    file.write(f"new {NEW}")
    file.now = 4.0
    assert keys.signing_key.key_id == "new"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no key"),
        ("# nothing\n", "no key"),
        (f"{OLD}", "32 bytes"),
        (f" {OLD}", "32 bytes"),
        (f"{OLD}{OLD}", "name"),
        (f"k {OLD[:-2]}", "32 bytes"),
        (f"k {OLD[:-1]}g", "hexadecimal"),
        ("k", "32 bytes"),
        (f"k/1 {OLD}", "name"),
        (f"k {OLD}\nk {NEW}", "twice"),
        (f"k {OLD}\n" * 2000, "longer"),
    ],
)
def test_a_malformed_file_is_refused_by_its_setting_and_the_error_shows_no_secret(
    file: KeyFile, content: str, message: str
) -> None:
    file.write(content)
    with pytest.raises(ConfigError, match=f"^signing_keys_file: .*{message}") as caught:
        file.keys()
    assert OLD[:40] not in str(caught.value)


def test_a_file_that_is_not_there_is_refused_by_its_setting(file: KeyFile) -> None:
    with pytest.raises(ConfigError, match=r"^signing_keys_file: cannot read"):
        file.keys()


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o644, 0o777])
def test_a_file_that_everybody_can_open_is_refused(file: KeyFile, mode: int) -> None:
    file.write(f"k {OLD}", mode)
    with pytest.raises(ConfigError, match="open to everybody"):
        file.keys()


def test_a_group_may_read_it(file: KeyFile) -> None:
    file.write(f"k {OLD}", 0o640)
    assert file.keys().signing_key.key_id == "k"


def test_no_repr_and_no_log_line_shows_a_secret(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    file.write(f"k {OLD}")
    keys = file.keys()
    file.write(f"k2 {NEW}")
    file.now = 1.0
    shown = f"{keys.signing_key!r} {keys.find('k2')} {keys!r} {caplog.text}"
    assert "k2" in shown
    assert NEW not in shown
    assert str(bytes.fromhex(NEW))[2:-1] not in shown
