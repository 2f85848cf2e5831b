"""Which URLs are followed, by scheme, host and port."""

from __future__ import annotations

import pytest

from quartet.errors import InvalidMediaError, MediaFetchError, MediaNotAllowedError
from router.media.url_rules import UrlRules

RULES = UrlRules(("https",), ("images.test", "*.cdn.test", "odd.test:8443", "[fd00::1]"))


@pytest.mark.parametrize(
    "url",
    [
        "https://images.test/a.png",
        "https://images.test:443/a.png?size=3",
        "HTTPS://IMAGES.TEST/a.png",
        "https://a.cdn.test/",
        "https://a.b.cdn.test/",
        "https://odd.test:8443/",
        "https://[fd00::1]/",
    ],
)
def test_a_url_that_a_rule_names_is_fetched(url: str) -> None:
    assert RULES.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://images.test/",
        "https://other.test/",
        "https://images.test.evil.test/",
        "https://evilimages.test/",
        "https://images.test./",
        "https://cdn.test/",
        "https://evilcdn.test/",
        "https://images.test:8443/",
        "https://odd.test/",
        "https://[::1]/",
        "https://127.0.0.1/",
        "https:///images.test",
        "https://evil.test#@images.test/",
        "https://evil.test/@images.test/",
    ],
)
def test_a_url_that_no_rule_names_is_not_fetched(url: str) -> None:
    with pytest.raises((MediaNotAllowedError, InvalidMediaError)):
        RULES.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://user@images.test/",
        "https://:password@images.test/",
        "https://images.test\\@evil.test/",
        "https://images.test\t/",
        " https://images.test/",
        "https://images.test/\n",
        "https://[images.test/",
        "https://images.test:port/",
        "https://images.test:99999/",
        "https://images.test/" + "a" * 9000,
    ],
)
def test_malformed_rules_are_refused(url: str) -> None:
    with pytest.raises(InvalidMediaError):
        RULES.parse(url)


def test_a_star_names_every_host_at_the_schemes_own_port() -> None:
    rules = UrlRules(("http",), ("*",))
    assert rules.parse("http://anything.test/")
    with pytest.raises(MediaNotAllowedError):
        rules.parse("http://anything.test:6379/")


def test_redirects_are_held_to_the_same_rules() -> None:
    url = RULES.parse("https://images.test/a/b.png")
    assert str(RULES.redirected(url, "../c.png")) == "https://images.test/c.png"
    assert str(RULES.redirected(url, "//x.cdn.test/")) == "https://x.cdn.test/"
    for location in ("http://images.test/", "//evil.test/", "file:///etc/passwd", "https://u:p@images.test/"):
        with pytest.raises((MediaNotAllowedError, InvalidMediaError)):
            RULES.redirected(url, location)
    for location in (None, "", "https://["):
        with pytest.raises(MediaFetchError):
            RULES.redirected(url, location)
