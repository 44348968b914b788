"""Custom operators of clean_text.yaml (`custom_operator_paths`); their arguments are in the recipe."""


def enough_sentences(row, least=2):
    """A function gets a row. True or False keeps or drops it; a row, None or an iterator of rows will do as well."""
    return row["text"].count(". ") + row["text"].endswith(".") >= least


class CountWords:
    """A class is made once per worker: the place for models and tables. In a recipe it is called count_words."""

    def __init__(self, field="words"):
        self.field = field

    def __call__(self, row):
        return {**row, self.field: len(row["text"].split())}
