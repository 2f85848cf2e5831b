"""Takes the pictures of the router's page: docs/images/page-light.png, page-dark.png and page-narrow.png.

python tools/take_page_pictures.py [--keep-open]

Starts one Encode, two Prefill and two Decode workers with the tiny model, has a few clients chat with them, and looks
at the page with Chromium (Debian's packages chromium and chromium-driver). Look at the pictures before you commit them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import yaml
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from services.topology.launch import free_port

PICTURES = Path("docs/images")
DRIVER = "/usr/bin/chromedriver"
PICTURE = Path("models/tiny/pictures/shapes.jpg").resolve()
# Width and height of the window, and the colour scheme. Each picture shows the whole page.
SIZES = {
    "page-light": (1440, 1060, "light"),
    "page-dark": (1440, 1060, "dark"),
    "page-narrow": (390, 844, "light"),
}

_TIMEOUT_S = 180.0
_NUM_CLIENTS = 6
# The fleet may change between Explain and the chat: then the answer is asked for again.
_MAX_ASKED = 30
# The charts show two minutes.
_LOAD_BEFORE_S = 125.0
_ENGINE = {"kind": "torch", "dtype": "float32", "num_blocks": 512, "num_threads": 1}
_SYSTEM = [
    f"You are {who}, and you answer in short and simple words that a child of five can understand. {rules}"
    for who in ("a teacher of young children", "a gardener with much time", "the captain of a small ship")
    for rules in (
        "Never speak of things that you do not know. Stay friendly, whatever is said to you, and end well. " * 4,
    )
]
_ASKED = [
    f"Tell me a short story about a {kind} named {name}."
    for kind in ("rabbit", "fox", "turtle", "bird")
    for name in ("Olive", "Max", "Clara", "Tom", "Ruby")
]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keep-open", action="store_true", help="print the address and keep the load until Ctrl-C")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, _fleet(Path(directory)) as url, _load(url):
        if arguments.keep_open:
            print(url, flush=True)
            signal.pause()
        take(url)


def take(url: str) -> None:
    """Take all pictures of the page at ``url``."""
    with _browser() as browser:
        _open(browser, url, *SIZES["page-light"])
        _until(browser, lambda: _seconds_of_load(browser) > _LOAD_BEFORE_S)
        _ask(browser)
        for name, size in SIZES.items():
            _resize(browser, *size)
            browser.execute_script("window.scrollTo(0, 0)")
            _until(browser, lambda: bool(browser.find_elements(By.CSS_SELECTOR, ".edge.hot")))
            height = browser.execute_script("return document.querySelector('main').getBoundingClientRect().bottom")
            clip = {"x": 0, "y": 0, "width": size[0], "height": height, "scale": 1}
            asked = {"captureBeyondViewport": True, "clip": clip}
            taken = browser.execute_cdp_cmd("Page.captureScreenshot", asked)
            (PICTURES / f"{name}.png").write_bytes(base64.b64decode(taken["data"]))


def _open(browser: webdriver.Chrome, url: str, width: int, height: int, scheme: str) -> None:
    _resize(browser, width, height, scheme)
    browser.get(url)
    _until(browser, lambda: browser.find_element(By.ID, "live").get_attribute("data-state") == "live")


def _resize(browser: webdriver.Chrome, width: int, height: int, scheme: str) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wanted = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", wanted)


def _ask(browser: webdriver.Chrome) -> None:
    """Ask about a picture, until the answer came from where Explain says, and show why."""
    for _ in range(_MAX_ASKED):
        browser.find_element(By.ID, "clear").click()
        browser.find_element(By.ID, "file").send_keys(str(PICTURE))
        _until(browser, lambda: bool(browser.find_elements(By.CSS_SELECTOR, ".picture")))
        browser.find_element(By.ID, "prompt").send_keys("Describe the picture.", Keys.ENTER)
        _until(browser, lambda: bool(browser.find_elements(By.CSS_SELECTOR, ".answer[data-state=done]")))
        _until(browser, lambda: browser.find_element(By.CSS_SELECTOR, ".why").is_displayed())
        browser.find_element(By.CSS_SELECTOR, ".why summary").click()
        if not browser.find_element(By.CSS_SELECTOR, ".why p span").text:
            break
    else:
        raise SystemExit(f"of {_MAX_ASKED} answers none came from where Explain said")
    browser.execute_script("const chat = document.getElementById('chat'); chat.scrollTop = chat.scrollHeight")


def _seconds_of_load(browser: webdriver.Chrome) -> float:
    return float(browser.execute_script("return performance.now() / 1000"))


def _until(browser: webdriver.Chrome, is_met: object) -> None:
    WebDriverWait(browser, _TIMEOUT_S, poll_frequency=0.05).until(lambda _browser: is_met())  # type: ignore[operator]


@contextmanager
def _browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


@contextmanager
def _fleet(directory: Path) -> Iterator[str]:
    """The address of a running fleet's page."""
    port = free_port()
    topology = {
        "namespace": "demo",
        "model": {"path": "models/tiny/checkpoint", "name": "tiny"},
        "engine": _ENGINE,
        "router": {"port": free_port(), "http_port": port, "overrides": {"policy": {"local_prefill_max_tokens": 0}}},
        "workers": [{"role": "encode"}, {"role": "prefill", "replicas": 2}, {"role": "decode", "replicas": 2}],
    }
    file = directory / "demo.yaml"
    file.write_text(yaml.safe_dump(topology))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [str(Path(sys.executable).with_name("quartet")), "up", str(file)]
    with (directory / "log").open("w") as log:
        up = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        try:
            assert up.stdout is not None
            if not any(line.strip() == "ready" for line in up.stdout):
                raise SystemExit((directory / "log").read_text())
            yield f"http://127.0.0.1:{port}/"
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(_TIMEOUT_S)


@contextmanager
def _load(url: str) -> Iterator[None]:
    """Clients that chat, each with one of a few system messages; one in six shows a picture."""
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_chat_all(url, is_over)))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def _chat_all(url: str, is_over: threading.Event) -> None:
    picture = f"data:image/jpeg;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
    async with aiohttp.ClientSession(url) as session:
        chats = [asyncio.create_task(_chat(session, random.Random(number), picture)) for number in range(_NUM_CLIENTS)]
        await asyncio.to_thread(is_over.wait)
        for chat in chats:
            chat.cancel()
        await asyncio.wait(chats)


async def _chat(session: aiohttp.ClientSession, draw: random.Random, picture: str) -> None:
    while True:
        content: object = draw.choice(_ASKED)
        if draw.random() < 1 / _NUM_CLIENTS:
            shown = {"type": "image_url", "image_url": {"url": picture}}
            content = [shown, {"type": "text", "text": "Describe the picture."}]
        messages = [{"role": "system", "content": draw.choice(_SYSTEM)}, {"role": "user", "content": content}]
        body = {"messages": messages, "max_tokens": draw.randrange(16, 64), "temperature": 0.8, "ignore_eos": True}
        async with session.post("v1/chat/completions", data=json.dumps(body)) as answer:
            await answer.read()


if __name__ == "__main__":
    main()
