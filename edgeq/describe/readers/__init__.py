"""Read the facts that one writer leaves, with one module for each writer. A module has its `Reader` under the name
READER, and its file name is the reader's name.
"""
