"""Applications of the library, which imports none of them.

`cli` is the command line, `bench` compares and tunes methods, `display` shows what a round did (and
has the page of `selfspec app`), `export` writes what other engines read.
"""
