"""The page of `selfspec app` in a browser: what a reader sees, and that nothing is fetched."""

import json
import shutil
from importlib.util import find_spec
from urllib.parse import urlsplit

import pytest
from cli_tools import PROMPT
from conftest import EXIT, tiny_llama

from selfspec import DraftConfig, SelfSpecModel
from selfspec.apps.display.app import DraftMenu, SideBySide
from selfspec.apps.display.demo import load_prompts

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.app,
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # those of other people's code are no errors here
    pytest.mark.skipif(
        not (find_spec("gradio") and find_spec("selenium")),
        reason="Gradio or Selenium is not installed; `make test-app` installs them",
    ),
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with its driver on the path"),
]


@pytest.fixture
def reader(tokenizer):
    """A browser that shows the page of a tiny target."""
    from selenium import webdriver

    from selfspec.apps.display.app.page import Page

    # Wide enough for the bytes of the examples, which have more letters than the tokenizer knows.
    spec = SelfSpecModel(tiny_llama("sometimes", max_position_embeddings=2048))
    page = Page(SideBySide(spec, tokenizer), DraftMenu(spec, DraftConfig(exit_layer=EXIT)), "tiny")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    # As root, and where /dev/shm is small, Chromium runs with these only; the rest keeps it quiet.
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
        options.add_argument(f"--{flag}")
    for flag in ("disable-background-networking", "disable-component-update", "no-first-run"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    with page.served("127.0.0.1", None, open_page=False) as address:
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
        try:
            browser.implicitly_wait(30)
            browser.set_window_size(1280, 1280)
            browser.get(address)
            yield browser
        finally:
            browser.quit()


def find(browser, selector):
    return browser.find_element("css selector", selector)


def wait_for(browser, what, seconds=120):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds).until(lambda _: what())


def typed(browser, selector, value):
    """Replace what a field holds."""
    from selenium.webdriver.common.keys import Keys

    find(browser, selector).send_keys(Keys.CONTROL, "a")
    find(browser, selector).send_keys(value, Keys.TAB)


def says(browser, words):
    wait_for(browser, lambda: words in find(browser, "#line").text)


def fetched(browser):
    """Every address that the page asked for."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [each["params"] for each in messages if each["method"] == "Network.requestWillBeSent"]
    return [urlsplit(each["request"]["url"]) for each in sent]


def test_a_reader_sees_both_texts_and_nothing_comes_from_elsewhere(reader):
    assert find(reader, "#prompt textarea").get_attribute("value") == load_prompts()[0].text
    typed(reader, "#prompt textarea", PROMPT)
    find(reader, "#write").click()
    says(reader, "both outputs are equal")
    panes = [find(reader, f"#{way} .text") for way in ("plain", "speculative")]
    plain, ours = (pane.get_property("textContent") for pane in panes)
    assert plain == ours != ""
    accepted = reader.find_elements("css selector", "#speculative span[title=accepted]")
    assert accepted
    assert "0, 158, 115" in accepted[0].value_of_css_property("background-color")
    assert "accepted" in find(reader, "#speculative .side-legend").text
    assert "–" not in find(reader, "#figures").text
    assert {url.hostname for url in fetched(reader) if url.scheme != "data"} == {"127.0.0.1"}
    assert [entry for entry in reader.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_a_reader_can_stop_and_is_told_of_mistakes(reader):
    typed(reader, "#prompt textarea", "the cat " * 600)
    find(reader, "#write").click()
    says(reader, "it outgrows the model's 2048 positions")
    typed(reader, "#prompt textarea", PROMPT)
    typed(reader, "#tokens input[type=number]", "512")
    find(reader, "#write").click()
    says(reader, "plain decoding")
    find(reader, "#stop").click()
    says(reader, "stopped")
    assert find(reader, "#write").is_enabled()


def test_a_reader_chooses_an_example_an_exit_and_a_drafter(reader):
    from selenium.webdriver.common.keys import Keys

    find(reader, "#example input").click()
    find(reader, "#example input").send_keys(Keys.ARROW_DOWN, Keys.ENTER)
    box = find(reader, "#prompt textarea")
    wait_for(reader, lambda: box.get_attribute("value") == load_prompts()[1].text)
    typed(reader, "#exit input[type=number]", "1")
    typed(reader, "#tokens input[type=number]", "16")
    find(reader, "#write").click()
    says(reader, "both outputs are equal, all 16 tokens")
    find(reader, "#drafter input").send_keys(Keys.CONTROL, "a")
    find(reader, "#drafter input").send_keys("prompt_lookup", Keys.ENTER)
    wait_for(reader, lambda: not find(reader, "#exit input[type=number]").is_enabled())
