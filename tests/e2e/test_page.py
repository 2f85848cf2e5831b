"""The page in headless Chromium, over a real fleet: it loads, chats, sees workers go and come, and needs no mouse."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from services.topology.launch import free_port
from tests.e2e.conftest import StartStack
from tests.e2e.stack import REMOTE_PREFILL, Stack, StackConfig

ACME, OPS = "acme-0123456789abcdef", "ops-0123456789abcdefg"
PICTURE = Path(__file__).parents[2] / "models/tiny/pictures/shapes.jpg"
CAPTION_BEGIN = "A small blue circle at the top"
TIMEOUT_S = 60.0
#: Each look takes Chromium, its driver and the test some milliseconds of CPU.
POLL_S = 0.2
STORY = "Tell me a short story about a rabbit named Olive."


@pytest.fixture(scope="module")
def page_stack(start_stack: StartStack, tmp_path_factory: pytest.TempPathFactory) -> Stack:
    """Encode, Prefill and two Decodes; one router without keys, and one with keys."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.touch(mode=0o600)
    keys.write_text(f"acme {ACME}\nops {OPS}\n")
    with_keys = {"http.port": free_port(), "http.keys_file": str(keys), "http.operators": ["ops"]}
    routers = {
        "router": {**REMOTE_PREFILL, "http.port": free_port()},
        "router-keys": {**REMOTE_PREFILL, **with_keys},
    }
    return start_stack(StackConfig(num_encode=1, num_decode=2, routers=routers))


def url_of(stack: Stack, router: str = "router") -> str:
    return f"http://127.0.0.1:{stack.config.routers[router]['http.port']}/"


class Browser:
    """Chromium, and what tests look for in the page."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    def one(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, is_met: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, TIMEOUT_S, poll_frequency=POLL_S).until(lambda _driver: is_met())

    def until_live(self) -> None:
        self.until(lambda: self.one("#live").get_attribute("data-state") == "live")

    def state_of(self, worker: str) -> str | None:
        return self.one(f"[data-worker={worker}]").get_attribute("data-state")

    def answer(self) -> WebElement:
        """The last answer."""
        return self.all(".turn.answer")[-1]

    def until_answer_is(self, state: str) -> WebElement:
        self.until(lambda: self.all(".turn.answer") and self.answer().get_attribute("data-state") == state)
        return self.answer()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver).send_keys(*keys).perform()

    def fill(self, selector: str, text: str) -> None:
        """Put ``text`` into a field at once, where it is not the typing that matters."""
        self.driver.execute_script("arguments[0].value = arguments[1]", self.one(selector), text)

    def tab_to(self, name: str) -> None:
        """Press Tab until the element with this id, or whose text begins so, has the focus."""
        for _ in range(60):  # once around the page at most
            self.press(Keys.TAB)
            if self.focused().startswith(name):
                return
        raise AssertionError(f"Tab never reaches {name}")

    def focused(self) -> str:
        """The id or the text of the element that has the focus."""
        script = "const e = document.activeElement; return e.id || e.textContent"
        return str(self.driver.execute_script(script))

    def watch_calls(self) -> None:
        """Keep what the page sends from now on; ``answer_once`` then answers in place of the router."""
        self.driver.execute_script("""
            window.bodies = [];
            window.signals = {};
            window.canned = {};
            const send = window.fetch;
            window.fetch = (path, options) => {
              if (path === "v1/chat/completions") window.bodies.push(options.body);
              window.signals[path] = options.signal;
              const text = window.canned[path];
              delete window.canned[path];
              return text === undefined ? send(path, options) : Promise.resolve(new Response(text));
            };""")

    def answer_once(self, path: str, text: str) -> None:
        self.driver.execute_script("window.canned[arguments[0]] = arguments[1]", path, text)

    def sent(self) -> list[Any]:
        """The messages of the last chat request."""
        messages: list[Any] = json.loads(self.driver.execute_script("return window.bodies.at(-1)"))["messages"]
        return messages

    def draft(self) -> str | None:
        """The text in the composer."""
        return self.one("#prompt").get_attribute("value")

    def errors(self, *statuses: int) -> list[Any]:
        """What the console says is wrong, but for answers with one of these statuses."""
        wanted = tuple(f"status of {status}" for status in statuses)
        return [entry for entry in self.driver.get_log("browser") if not any(one in entry["message"] for one in wanted)]


@pytest.fixture(scope="module")
def chromium(chromedriver: Path) -> Iterator[Chrome]:
    options = ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1280,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(chromedriver)))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: Chrome, page_stack: Stack) -> Browser:
    """At the page of the router without keys, live, with an empty console."""
    browser = Browser(chromium)
    browser.open(url_of(page_stack))
    browser.until_live()
    browser.until(lambda: len(browser.all(".worker[data-state=ready]")) == 4)
    assert browser.errors() == []
    return browser


def test_it_shows_the_fleet_and_its_figures_without_an_error(browser: Browser) -> None:
    names = [element.get_attribute("data-worker") for element in browser.all(".worker")]
    assert names == ["encode-0", "prefill-0", "decode-0", "decode-1"]
    assert [element.text.split()[0] for element in browser.all(".column h3")] == ["Encode", "Prefill", "Decode"]
    assert "0 waiting" in browser.one("#router").text
    figures = [element.text.splitlines()[0] for element in browser.all(".figure")]
    assert figures == ["Requests", "Tokens", "First token", "Queue", "Cache hits"]
    assert not browser.one("#reuse").is_displayed()  # nothing was asked yet
    browser.one("[data-worker=decode-0] summary").click()
    browser.until(lambda: "shm" in browser.one("[data-worker=decode-0] .facts").text)
    assert browser.errors() == []


def test_a_chat_with_a_picture_streams_and_says_where_and_how_long(browser: Browser) -> None:
    browser.one("#settings summary").click()
    browser.one("#temperature").clear()
    browser.one("#temperature").send_keys("0")
    browser.one("#file").send_keys(str(PICTURE))
    browser.until(lambda: browser.all("#pictures img"))
    browser.driver.execute_script("""
        window.lengths = new Set();
        new MutationObserver(() => {
          const content = document.querySelector(".answer .content");
          if (content) window.lengths.add(content.textContent.length);
        }).observe(document.getElementById("chat"), {subtree: true, childList: true, characterData: true});""")
    browser.one("#prompt").send_keys("Describe the picture.", Keys.ENTER)
    answer = browser.until_answer_is("done")
    assert answer.find_element(By.CSS_SELECTOR, ".content").text.startswith(CAPTION_BEGIN)
    assert len(browser.driver.execute_script("return [...window.lengths]")) > 5  # it came piece by piece
    assert browser.one(".turn.user img").get_attribute("src").startswith("data:image/jpeg;base64,")
    hops = answer.find_element(By.CSS_SELECTOR, ".hops").text
    assert hops.startswith("encode-0 → prefill-0 → decode-")
    segments = answer.find_elements(By.CSS_SELECTOR, ".segment")
    names = [str(element.get_attribute("title")).split()[0] for element in segments]
    assert names == ["queue", "encode", "prefill", "transfer", "decode"]
    widths = [element.rect["width"] for element in segments]
    assert min(widths) > 0 and widths[4] == max(widths)
    browser.until(lambda: answer.find_element(By.CSS_SELECTOR, ".why").is_displayed())
    answer.find_element(By.CSS_SELECTOR, ".why summary").click()
    rows = [row.text for row in answer.find_elements(By.CSS_SELECTOR, ".why tbody tr")]
    assert len(rows) == 3 and sum("chosen" in row for row in rows) == 2
    browser.until(lambda: browser.all(".edge.seen"))
    browser.until(lambda: browser.one("#reuse").text.startswith("Reuse: of "))
    assert browser.errors() == []


def test_a_killed_worker_is_shown_as_gone_and_then_as_back(browser: Browser, page_stack: Stack) -> None:
    page_stack.kill("decode-1")
    browser.until(lambda: browser.state_of("decode-1") in ("suspect", "gone"))
    browser.until(lambda: browser.state_of("decode-1") == "gone")
    assert "gone" in browser.one("[data-worker=decode-1] .state").text
    assert "1 of 2" in browser.one(".column[data-role=decode] h3").text
    assert "decode-1: gone" in browser.one("#changes").text
    page_stack.spawn("decode-1")
    browser.until(lambda: browser.state_of("decode-1") == "ready")
    assert "decode-1: ready" in browser.one("#changes").text
    assert len(browser.all("[data-worker=decode-1]")) == 1
    page_stack.wait_ready()
    assert browser.errors() == []


def test_everything_is_reached_by_the_keyboard_alone(browser: Browser, page_stack: Stack) -> None:
    browser.fill("#max_tokens", "24")
    browser.press(Keys.TAB)
    assert browser.focused() == "Skip to the playground"
    browser.press(Keys.ENTER)
    browser.until(lambda: browser.focused() == "prompt")
    browser.press(STORY)
    ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()
    browser.press("Begin.", Keys.ENTER)
    answer = browser.until_answer_is("done")
    assert browser.one(".turn.user p").text == f"{STORY}\nBegin."
    assert answer.find_element(By.CSS_SELECTOR, ".content").text
    assert browser.focused() == "prompt"
    browser.tab_to("Settings")
    browser.press(Keys.ENTER)
    browser.tab_to("max_tokens")
    browser.press("500")  # in place of what was there, which Tab selects
    browser.tab_to("explain")
    browser.press(Keys.SPACE)
    assert not browser.one("#explain").is_selected()
    browser.tab_to("decode-0")
    browser.press(Keys.ENTER)
    assert browser.one("[data-worker=decode-0] details").get_attribute("open")
    browser.tab_to("Why there")
    browser.press(Keys.ENTER)
    assert browser.one(".why table").is_displayed()
    browser.tab_to("prompt")
    page_stack.freeze("decode-0", "decode-1")  # else it might end before it is stopped
    try:
        browser.press(STORY, Keys.ENTER)
        browser.until(lambda: len(browser.all(".turn.answer")) == 2 and browser.one("#stop").is_displayed())
        browser.press(Keys.ESCAPE)
        browser.until_answer_is("stopped")
        browser.until(lambda: not browser.one("#stop").is_displayed())
    finally:
        page_stack.thaw("decode-0", "decode-1")
    assert browser.errors() == []


def test_an_error_names_what_is_wrong_and_what_to_do(browser: Browser) -> None:
    browser.one("#settings summary").click()
    browser.one("#top_p").send_keys("7")
    browser.one("#prompt").send_keys("hi", Keys.ENTER)
    problem = browser.until_answer_is("failed").find_element(By.CSS_SELECTOR, ".problem").text
    assert "top_p" in problem and "Change top p in the settings." in problem
    browser.one("#top_p").clear()
    browser.one("#tools").send_keys("[{")
    browser.one("#prompt").send_keys(" again", Keys.ENTER)
    browser.until(lambda: "are no JSON" in browser.until_answer_is("failed").text)
    browser.one("#tools").clear()
    # At once: the page's own list comes back with each state.
    browser.driver.execute_script("""
        const model = document.getElementById("model");
        model.add(new Option("another"));
        model.value = "another";
        document.getElementById("composer").requestSubmit();""")
    browser.until(lambda: "Choose a model of the list" in browser.until_answer_is("failed").text)
    assert browser.errors(400, 404) == []


def test_a_refused_message_comes_back_and_is_not_asked_again(browser: Browser) -> None:
    browser.watch_calls()
    browser.one("#settings summary").click()
    browser.one("#top_p").send_keys("7")
    browser.one("#file").send_keys(str(PICTURE))
    browser.until(lambda: browser.all("#pictures img"))
    browser.one("#prompt").send_keys("bad", Keys.ENTER)
    browser.until_answer_is("failed")
    assert browser.draft() == "bad" and len(browser.all("#pictures img")) == 1
    browser.one("#top_p").clear()
    browser.one("#pictures .remove").click()
    browser.one("#prompt").clear()
    browser.one("#prompt").send_keys("What is 17 plus 25?", Keys.ENTER)
    browser.until_answer_is("done")
    assert browser.sent() == [{"role": "user", "content": "What is 17 plus 25?"}]
    assert browser.draft() == "" and not browser.all("#pictures img")
    assert browser.errors(400) == []


def test_a_message_stopped_before_its_first_token_comes_back_and_the_focus_stays(
    browser: Browser, page_stack: Stack
) -> None:
    browser.watch_calls()
    page_stack.freeze("prefill-0")  # which gives first tokens
    try:
        browser.one("#prompt").send_keys(STORY)
        browser.one("#send").click()
        browser.until(lambda: browser.one("#stop").is_displayed())
        assert browser.focused() == "prompt"
        browser.tab_to("stop")
        browser.press(Keys.ENTER)
        browser.until_answer_is("stopped")
        browser.until(lambda: not browser.one("#stop").is_displayed())
    finally:
        page_stack.thaw("prefill-0")
    assert browser.focused() == "prompt" and browser.draft() == STORY
    for path in ("v1/chat/completions", "page/explain"):
        assert browser.driver.execute_script("return window.signals[arguments[0]].aborted", path), path
    browser.one("#prompt").clear()
    browser.one("#prompt").send_keys("What is 17 plus 25?", Keys.ENTER)
    browser.until_answer_is("done")
    assert browser.sent() == [{"role": "user", "content": "What is 17 plus 25?"}]
    assert browser.errors() == []


def test_a_new_chat_has_nothing_of_the_answer_that_still_came(browser: Browser, page_stack: Stack) -> None:
    browser.watch_calls()
    browser.one("#settings summary").click()
    browser.one("#max_tokens").clear()
    browser.one("#max_tokens").send_keys("400")
    browser.one("#prompt").send_keys(STORY, Keys.ENTER)
    browser.until(lambda: browser.all(".answer .content") and browser.one(".answer .content").text)
    page_stack.freeze("decode-0", "decode-1")
    try:
        assert browser.one("#stop").is_displayed()
        browser.one("#clear").click()
        browser.until(lambda: not browser.one("#stop").is_displayed())
    finally:
        page_stack.thaw("decode-0", "decode-1")
    assert browser.draft() == "" and not browser.all(".turn")
    browser.one("#prompt").send_keys("What is 17 plus 25?", Keys.ENTER)
    browser.until_answer_is("done")
    assert browser.sent() == [{"role": "user", "content": "What is 17 plus 25?"}]
    assert browser.errors() == []


def test_what_was_loaded_is_a_part_of_its_own(browser: Browser) -> None:
    browser.watch_calls()
    time = {"decode_queue_s": 0.1, "onboard_s": 0.05, "total_s": 1.0}
    for prefill, expected in (
        ({"prefill_s": 0.3, "prefill_queue_s": 0.1}, "queue 200 ms, onboard 50 ms, prefill 150 ms, decode 600 ms"),
        ({}, "queue 100 ms, onboard 50 ms, decode 850 ms"),
    ):
        choice = {"placement": {"decode": "decode-0/0"}, "time": {**time, **prefill}}
        answer = {"choices": [{"index": 0, "delta": {"content": "Yes."}, "finish_reason": "stop"}]}
        events = [answer, {"choices": [], "quartet": {"choices": [choice]}}]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        browser.answer_once("v1/chat/completions", f"{text}data: [DONE]\n\n")
        browser.one("#prompt").send_keys("Well?", Keys.ENTER)
        bar = browser.until(lambda: browser.until_answer_is("done").find_elements(By.CSS_SELECTOR, ".time-bar"))[0]
        assert bar.get_attribute("aria-label") == expected
        browser.one("#clear").click()
    assert browser.errors() == []


def test_every_call_of_a_tool_has_a_result_before_another_message(browser: Browser) -> None:
    browser.watch_calls()
    function = {"name": "look", "arguments": "{}"}
    calls = [{"index": 0, "id": "call_0", "type": "function", "function": function}]
    event = {"choices": [{"index": 0, "delta": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    browser.answer_once("v1/chat/completions", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n")
    browser.one("#prompt").send_keys("Look.", Keys.ENTER)
    browser.until_answer_is("done")
    browser.until(lambda: browser.all(".results"))
    browser.one("#settings summary").click()
    browser.one("#top_p").send_keys("7")
    browser.one("#prompt").send_keys("hi", Keys.ENTER)
    browser.until_answer_is("failed")
    assert browser.draft() == "hi" and len(browser.all(".results input")) == 1  # both can be had again
    browser.one("#top_p").clear()
    browser.one("#prompt").send_keys(Keys.ENTER)
    browser.until(lambda: len(browser.all(".turn.answer")) == 3)
    roles = [message["role"] for message in browser.sent()]
    assert roles == ["user", "assistant", "tool", "user"] and not browser.all(".results")
    assert browser.sent()[1]["tool_calls"][0]["id"] == browser.sent()[2]["tool_call_id"] == "call_0"
    assert "no result" in browser.sent()[2]["content"]
    browser.until_answer_is("done")
    assert browser.errors(400) == []


def test_a_router_that_says_nothing_is_shown_without_contact_and_followed_again(
    browser: Browser, page_stack: Stack
) -> None:
    page_stack.freeze("router")
    try:
        browser.until(lambda: browser.one("#live").get_attribute("data-state") == "broken")
        assert browser.one("#live").text == "no contact"
        assert "said nothing for 5 s" in browser.one("#problem").text
    finally:
        page_stack.thaw("router")
    browser.until_live()
    browser.until(lambda: len(browser.all(".worker[data-state=ready]")) == 4)
    assert not browser.one("#problem").is_displayed()
    assert browser.errors() == []


def test_on_a_phone_the_chat_is_as_long_as_what_is_in_it(browser: Browser) -> None:
    size = {"width": 390, "height": 500, "deviceScaleFactor": 1, "mobile": True}
    browser.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.one("#prompt").send_keys("What is 17 plus 25?", Keys.ENTER)
        answer = browser.until_answer_is("done")
        browser.until(lambda: answer.find_element(By.CSS_SELECTOR, ".why").is_displayed())
        browser.driver.execute_script("document.querySelector('.why').open = true")
        heights = "const chat = document.getElementById('chat'); return [chat.scrollHeight, chat.clientHeight]"
        whole, shown = browser.driver.execute_script(heights)
        assert whole == shown > 310  # which is all that a wide window of this height shows
        assert browser.driver.execute_script("return document.documentElement.scrollWidth") == 390
    finally:
        browser.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_an_answer_follows_the_schema_of_the_settings(browser: Browser) -> None:
    browser.one("#settings summary").click()
    digit = {"type": "integer", "minimum": 0, "maximum": 9}
    schema = {"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False}
    browser.fill("#schema", json.dumps(schema))
    browser.one("#prompt").send_keys("What is 3 plus 4?", Keys.ENTER)
    answer = json.loads(browser.until_answer_is("done").find_element(By.CSS_SELECTOR, ".content").text)
    assert list(answer) == ["n"] and 0 <= answer["n"] <= 9
    assert browser.errors() == []


def test_a_message_is_text_whatever_it_holds(browser: Browser) -> None:
    markup = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    browser.one("#prompt").send_keys(markup, Keys.ENTER)
    browser.until(lambda: browser.all(".turn.answer"))
    assert browser.one(".turn.user p").text == markup
    assert not browser.all(".turn img, .turn script")
    browser.one("#clear").click()
    assert browser.errors() == []


def test_a_page_in_the_background_lets_its_stream_go(browser: Browser) -> None:
    driver = browser.driver
    driver.execute_script("""
        window.seen = [];
        const live = document.getElementById("live");
        new MutationObserver(() => window.seen.push(live.dataset.state)).observe(live, {attributes: true});""")
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    other = driver.current_window_handle
    driver.switch_to.window(first)
    browser.until(lambda: "paused" in driver.execute_script("return window.seen"))
    driver.switch_to.window(other)
    driver.close()
    driver.switch_to.window(first)
    browser.until_live()
    assert browser.errors() == []


def test_with_keys_the_page_asks_for_one_and_shows_the_fleet_to_operators(chromium: Chrome, page_stack: Stack) -> None:
    browser = Browser(chromium)
    browser.open(url_of(page_stack, "router-keys"))
    browser.until(lambda: browser.one("#key-dialog").get_attribute("open"))
    assert not browser.all(".worker")

    def enter(key: str) -> None:
        browser.until(lambda: browser.focused() == "key")
        browser.press(key, Keys.ENTER)

    enter("wrong-0123456789abcdef")
    browser.until(lambda: "does not know this API key" in browser.one("#key-note").text)
    browser.watch_calls()
    browser.answer_once("v1/models", '{"data": []}')  # as while no worker has joined
    enter(ACME)
    browser.until(lambda: "http.operators" in browser.one("#fleet-note").text)
    browser.until(lambda: browser.all("#model option"))
    browser.until(lambda: browser.one("#model option").get_attribute("value") == "tiny")
    browser.one("#prompt").send_keys("What is 17 plus 25?", Keys.ENTER)
    assert browser.until_answer_is("done").find_element(By.CSS_SELECTOR, ".hops").text.startswith("prefill-0")
    browser.one("#key-button").click()
    enter(OPS)
    browser.until(lambda: len(browser.all(".worker[data-state=ready]")) == 4)
    storage = chromium.execute_script("return [localStorage.length, sessionStorage.length, document.cookie]")
    assert storage == [0, 1, ""]
    chromium.execute_script("document.getElementById('changes').append('decode-0: gone')")
    browser.one("#key-button").click()
    enter(ACME)
    browser.until(lambda: "http.operators" in browser.one("#fleet-note").text)
    assert not browser.all(".worker") and not browser.one("#changes").get_attribute("textContent")
    assert browser.errors(401, 403) == []
