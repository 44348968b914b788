"""Custom operators of clean_text.yaml (`custom_operator_paths`); their arguments are in the recipe."""


def enough_sentences(row, least=2):
    """A function gets a row and returns True or False (keep or drop), a row, None, or an iterator of rows."""
    return row["text"].count(". ") + row["text"].endswith(".") >= least


class CountWords:
    """A class is created once per worker, and can load models and tables. In a recipe its name is count_words."""

    def __init__(self, field="words"):
        self.field = field

    def __call__(self, row):
        return {**row, self.field: len(row["text"].split())}
