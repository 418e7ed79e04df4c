"""The Playground in a browser: branches of a conversation, exports, code, Markdown, and all saved steps of a run.

pytest tests/browser/test_playground.py
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.learning import ANSWER, LearningBackend
from tests.browser.pages import NARROW, Watched
from tests.dashboard import Owner

INJECTED = """# Result

Some **bold**, *slanted* and `<b>code</b>` text.

- first
- second
  1. inner

| name | value |
|---|---|
| loss | 0.5 |

```python
print("<script>alert(1)</script>")
```

<img src=x onerror="document.title='broken'"> and [a page](https://example.org/a), [a trap](javascript:alert(1))"""


@pytest.fixture
def markdown_answer(learning: LearningBackend) -> Iterator[None]:
    """The model answers with Markdown and with markup."""
    tokenizer, before = learning.texts._tokenizer, learning.answer
    assert tokenizer is not None
    learning.answer = tokenizer.encode(INJECTED).ids
    yield
    learning.answer = before


def send(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()
    settle(page)


def settle(page: Page) -> None:
    """Until the answer is whole."""
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()


def copied(page: Page, name: str) -> str:
    """What a button has copied."""
    page.get_by_role("button", name=name).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    return str(page.evaluate("navigator.clipboard.readText()"))


def test_a_message_is_edited_and_an_answer_drawn_again_in_branches_of_their_own(
    seen: Watched, owners: tuple[Owner, Owner]
) -> None:
    chats = owners[0].server.backend.tiny.sampler.chats
    page = seen.open("/playground")
    log = page.get_by_role("log", name="Conversation 1")
    send(page, "First?")
    send(page, "Second?")
    assert [one["content"] for one in chats[-1].body["messages"]] == ["First?", ANSWER, "Second?"]
    page.get_by_role("button", name="Regenerate message 4").click()
    settle(page)
    assert [one["content"] for one in chats[-1].body["messages"]] == ["First?", ANSWER, "Second?"]
    expect(log.locator(".turn.of-assistant").nth(1)).to_contain_text("2/2")
    page.get_by_role("button", name="Edit message 1").click()
    page.get_by_label("Edited message").fill("Another?")
    page.get_by_role("button", name="Send the edited message").click()
    settle(page)
    assert [one["content"] for one in chats[-1].body["messages"]] == ["Another?"]
    expect(log.locator(".bubble")).to_have_count(2)
    page.get_by_role("button", name="Earlier branch of message 1").click()
    expect(log.locator(".bubble")).to_have_count(4)
    expect(log).to_contain_text("Second?")
    assert seen.violations() == []


def test_a_chat_is_exported_and_copied_as_code(
    seen: Watched, context: BrowserContext, owners: tuple[Owner, Owner], tmp_path: Path
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=seen.url)
    page = seen.open("/playground")
    page.get_by_label("System prompt").fill("It's brief.")
    page.get_by_label("Seed").fill("7")
    send(page, "What?")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export JSON").click()
    download.value.save_as(tmp_path / "chat.json")
    exported = json.loads((tmp_path / "chat.json").read_text())
    messages = [{"role": "system", "content": "It's brief."}, {"role": "user", "content": "What?"}]
    assert exported["messages"] == [*messages, {"role": "assistant", "content": ANSWER}]
    assert (exported["model"], exported["seed"], exported["max_tokens"]) == ("tiny", 7, 256)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export Markdown").click()
    download.value.save_as(tmp_path / "chat.md")
    assert f"## User\n\nWhat?\n\n## Assistant\n\n{ANSWER}" in (tmp_path / "chat.md").read_text()
    curl = copied(page, "Copy as curl")
    assert f"{seen.url}/oai/api/v1/chat/completions" in curl and "$TINKER_API_KEY" in curl
    asked = json.loads(curl.partition("-d '")[2].rstrip().removesuffix("'").replace("'\\''", "'"))
    assert (asked["model"], asked["messages"], asked["seed"]) == ("tiny", messages, 7)
    for name in ("Copy as openai", "Copy as SDK"):
        page.wait_for_timeout(2100)  # the button has its name again
        program = copied(page, name)
        compile(program, name, "exec")
        assert f'base_url="{seen.url}' in program and "It's brief." in program
    assert seen.violations() == []


def test_markdown_of_an_answer_is_shown_and_markup_in_it_stays_text(seen: Watched, markdown_answer: None) -> None:
    page = seen.open("/playground")
    log = page.get_by_role("log", name="Conversation 1")
    send(page, "Show.")
    for tag, text in (
        ("strong", "bold"),
        ("em", "slanted"),
        ("td", "loss"),
        ("ol li", "inner"),
        ("p code", "<b>code</b>"),
    ):
        expect(log.locator(f".prose {tag}", has_text=text).first).to_be_visible()
    assert log.locator("pre").inner_text() == 'print("<script>alert(1)</script>")'
    assert [link.get_attribute("href") for link in log.get_by_role("link").all()] == ["https://example.org/a"]
    assert log.locator("img, script, b").count() == 0 and "Playground" in page.title()
    expect(log).to_contain_text("onerror")
    assert seen.violations() == []
    page.get_by_label("Markdown", exact=True).uncheck()
    assert log.locator(".bubble.assistant").first.inner_text() == INJECTED


def test_deeply_nested_markup_is_shown_without_an_error(seen: Watched) -> None:
    page = seen.open("/playground")
    text = ">" * 5000 + " deep\n\n" + "*_" * 3000 + "x" + "_*" * 3000 + "\n\n" + "`" * 4001 + "[" * 4000
    length = page.evaluate(
        """async (text) => {
            const { markdown } = await import("/static/markdown.js");
            const box = document.createElement("div");
            box.append(...markdown(text));
            return box.textContent.length;
        }""",
        text,
    )
    assert length > 1000


def test_every_saved_step_of_a_run_answers_the_same(seen: Watched, owners: tuple[Owner, Owner]) -> None:
    alice, _ = owners
    made = alice.new_run()
    for number in range(3):
        alice.train(made, range(2 * number, 2 * number + 1))
        alice.post("/save_weights_for_sampler", model_id=made, seq_id=4 * number + 3, path=f"step-{number}")
        alice.save(made, 4 * number + 4, f"state-{number}")
    page = seen.open(f"/runs/{made}")
    page.get_by_role("link", name="Ask every saved step the same").click()
    expect(page.get_by_label("Every saved step of")).to_have_value(made)
    page.get_by_label("Message", exact=True).fill("What is it?")
    page.get_by_role("button", name="Ask each step the message").dblclick()
    strip = page.get_by_role("region", name="Answers of every saved step")
    expect(strip.locator(".card")).to_have_count(3)
    settle(page)
    for number in range(3):
        card = strip.locator(".card").nth(number)
        expect(card.get_by_role("heading")).to_have_text(f"step-{number} · step {number + 1}")
        expect(card).to_contain_text("sailing boat")
    asked = {chat.body["model"] for chat in alice.server.backend.tiny.sampler.chats[-3:]}
    assert asked == {f"tinker://{made}/sampler_weights/step-{number}" for number in range(3)}
    assert sum("steps.json" in url for url in seen.requests) == 1, "a second click asks nothing"
    assert seen.violations() == []
    page.set_viewport_size(NARROW)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.parametrize(
    "text",
    ["[" * 90_000, "|\n" + " " * 900 + "-" * 900 + "x|", "- " + " " * 80_000 + "a\rb"],
    ids=["link", "table", "item"],
)
def test_an_answer_that_only_begins_like_markup_is_shown_at_once(seen: Watched, text: str) -> None:
    took_ms = seen.open("/playground").evaluate(
        """async (text) => {
            const { markdown } = await import("/static/markdown.js");
            const began = performance.now();
            markdown(text);
            return performance.now() - began;
        }""",
        text,
    )
    assert took_ms < 500
