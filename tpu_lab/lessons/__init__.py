"""What the notebooks draw and keep beside their lesson: curves, tables, and what is compiled ahead of time.

A file a notebook, of the same name. The lesson itself, its training loop and its words, is in `notebooks/`.
"""
