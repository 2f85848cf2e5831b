"""``--image`` of commands that send a prompt: files and URLs, in a user's message or beside a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.prompt import MediaError, to_media
from quartet.client import MediaFile, MediaKind, MediaUrl
from quartet.errors import MediaNotAllowedError
from quartet.v1 import router_pb2
from tests.cli.conftest import RunCli
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

URL = "https://example.org/b.png"
SENT = [router_pb2.MediaPart(data=b"picture"), router_pb2.MediaPart(url=URL)]


@pytest.fixture
def router() -> FakeRouter:
    return FakeRouter()


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    file = tmp_path / "a.png"
    file.write_bytes(b"picture")
    return file


@pytest.mark.parametrize("command", ["generate", "explain"])
async def test_pictures_come_before_the_text_of_a_users_message(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, picture: Path, command: str
) -> None:
    images = ("--image", str(picture), "--image", URL)
    result = await run_cli(command, "What?", "--chat", *images, "--router", await start_router(router))
    assert (result.exit_code, result.stderr) == (0, "")
    [message] = router.starts[0].chat.messages
    assert [part.media for part in message.parts[:2]] == SENT
    assert (message.role, message.parts[2].text, message.content) == ("user", "What?", "")
    assert not router.starts[0].media


@pytest.mark.parametrize("command", ["generate", "explain"])
async def test_other_prompts_have_pictures_beside_them(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli, picture: Path, command: str
) -> None:
    address = await start_router(router)
    images = ("--image", str(picture), "--image", URL)
    await run_cli(command, "<|image|><|image|>What?", *images, "--router", address)
    await run_cli(command, "--token-ids", "7,7,9", *images, "--router", address)
    text, ids = router.starts
    assert (text.text, list(text.media)) == ("<|image|><|image|>What?", SENT)
    assert (list(ids.token_ids.ids), list(ids.media)) == ([7, 7, 9], SENT)


@pytest.mark.parametrize("command", ["generate", "explain", "chat"])
async def test_a_file_that_is_not_there_is_exit_code_2(run_cli: RunCli, command: str) -> None:
    prompt = [] if command == "chat" else ["What?"]
    result = await run_cli(command, *prompt, "--image", "/nowhere/at/all.png", "--router", "127.0.0.1:1")
    assert result.exit_code == 2
    assert "--image /nowhere/at/all.png: No such file or directory" in " ".join(result.stderr.replace("│", "").split())


async def test_a_url_that_the_router_does_not_allow_is_one_line(
    router: FakeRouter, start_router: StartRouter, run_cli: RunCli
) -> None:
    field = "chat.messages[0].parts[1].media.url"
    router.error = MediaNotAllowedError("no such host is allowed", field=field)
    result = await run_cli("generate", "What?", "--chat", "--image", URL, "--router", await start_router(router))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"quartet: PERMISSION_DENIED MEDIA_NOT_ALLOWED ({field}): no such host is allowed\n"


@pytest.mark.parametrize("url", ["http://a/b.png", "HTTPS://a/b", "file:///tmp/a.png", "data:image/png;base64,AA=="])
def test_a_url_is_passed_to_the_router(url: str) -> None:
    assert to_media(url) == MediaUrl(url)


def test_anything_else_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a:b.png", "~/a:b.png"):
        (tmp_path / "a:b.png").write_bytes(b"picture")
        assert to_media(name) == MediaFile(MediaKind.IMAGE, b"picture")


def test_a_file_that_no_request_holds_is_named(tmp_path: Path) -> None:
    file = tmp_path / "big.png"
    with file.open("wb") as sparse:
        sparse.truncate(64 * 1024 * 1024 + 1)
    with pytest.raises(MediaError, match=r"big\.png: the file is longer than the 64 MiB"):
        to_media(str(file))
