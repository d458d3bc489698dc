"""What a package says about its licence is read where Debian and the pages write it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "model" / "training"))

from licences import claims, page_claims, stated

COPYRIGHT = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2009, Somebody
License: BSD-2-clause

Files: docs/*
 extra/*
Copyright: 2009, Somebody
License: CC-BY-SA-4
 The text of the licence.

Files: debian/*
Copyright: 2012, Somebody Else
License: GPL-2+
"""


def test_the_licence_of_the_documentation_is_told_from_that_of_the_code() -> None:
    assert stated(COPYRIGHT) == [("*", "BSD-2-clause"), ("docs/* extra/*", "CC-BY-SA-4")]


@pytest.mark.parametrize(
    "text",
    [
        "This work is licensed under the Creative Commons Attribution-ShareAlike 3.0 Unported License.",
        "the prose is under the terms of the\nCreative Commons CC-BY-SA v4.0 license",
        "you can redistribute it and/or modify\n# it under the terms of the GNU General Public License",
        "This code is licensed under the GNU LGPL version 3",
        '<a href="https://creativecommons.org/licenses/by-sa/3.0/">',
    ],
)
def test_share_alike_and_copyleft_words_are_found(text: str) -> None:
    assert len(claims(text)) == 1


@pytest.mark.parametrize("text", ["Licensed under the Apache License, Version 2.0.", "MIT, BSD-3, GPL-3, MPL-2, etc"])
def test_permissive_words_are_not(text: str) -> None:
    assert claims(text) == []


def test_a_claim_in_the_footer_that_the_corpus_drops_is_found_once() -> None:
    footer = "<footer>licensed under CC BY-SA 4.0</footer><footer>licensed under CC BY-SA 4.0</footer>"
    assert page_claims("a/b.html", f"<p>Text.</p>{footer}".encode()) == ["CC BY-SA"]
