"""Pages are short, and so are their sentences."""

from docs.extensions import prose


def test_all_pages_have_40_000_words_and_short_sentences():
    found = prose.of_pages(prose.PAGES)
    assert found.words <= 40_000
    assert sum(found.sentences) / len(found.sentences) <= 15
    assert sum(length > 30 for length in found.sentences) <= 0.02 * len(found.sentences)


def test_sentences_are_counted_without_code_tables_and_targets_of_links():
    text = (
        "# No\n\nOne [two](a b). Three `x y`: four\nfive.\n\n| a |\n\n```python\nno\n```\n- six\n"
    )
    assert prose.of_text(text).sentences == [2, 4, 1]
