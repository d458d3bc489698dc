"""Turns documentation pages into plain text."""

import html
import re

_DROP = re.compile(
    r"<!--.*?-->|<(script|style|head|nav|footer|svg|button|select)\b.*?</\1\s*>"
    r"|<div[^>]*class=\"(?:sphinxsidebar|related|footer|NAVHEADER|NAVFOOTER|navheader|navfooter)\b.*?</div>",
    re.DOTALL | re.IGNORECASE,
)
_HEADING = re.compile(r"<h([1-6])\b[^>]*>", re.IGNORECASE)
_ITEM = re.compile(r"<li\b[^>]*>", re.IGNORECASE)
_CELL = re.compile(r"</t[dh]>\s*", re.IGNORECASE)
_BREAK = re.compile(
    r"</?(?:p|div|h[1-6]|li|ul|ol|dl|dt|dd|tr|table|pre|blockquote|section|br|hr)\b[^>]*>", re.IGNORECASE
)
_TAG = re.compile(r"<[^>]*>")
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre>", re.DOTALL | re.IGNORECASE)
_SPACE = re.compile(r"[ \t\r\n\f]+")
_TRAILING = re.compile(r"[ \t]+\n")
_BLANK = re.compile(r"\n{3,}")


def _prose(page: str) -> str:
    """Plain text of HTML outside <pre>: white space folds, block elements end lines."""
    page = _SPACE.sub(" ", page)
    page = _HEADING.sub(lambda m: "\n\n" + "#" * int(m.group(1)) + " ", page)
    page = _CELL.sub(" | ", _ITEM.sub("\n- ", page))
    return html.unescape(_TAG.sub("", _BREAK.sub("\n", page)))


def strip_html(page: str) -> str:
    """Return the readable text of an HTML page; <pre> blocks keep their line breaks."""
    page = _DROP.sub(" ", page)
    pieces: list[str] = []
    end = 0
    for block in _PRE.finditer(page):
        pieces += [_prose(page[end : block.start()]), "\n", html.unescape(_TAG.sub("", block.group(1))), "\n"]
        end = block.end()
    pieces.append(_prose(page[end:]))
    return tidy("".join(pieces))


def tidy(text: str) -> str:
    """Drop pilcrows (anchor marks of Sphinx), trailing blanks and runs of empty lines."""
    text = text.replace("\xa0", " ").replace("¶", "").replace("\r\n", "\n").replace("\n ", "\n ")
    lines = (line if line.startswith("  ") else line.strip() for line in _TRAILING.sub("\n", text).split("\n"))
    return _BLANK.sub("\n\n", "\n".join(lines)).strip() + "\n"
