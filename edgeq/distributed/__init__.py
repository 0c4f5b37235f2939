"""Work shared among processes of this machine or of a cluster, through Dask (the extra `distributed`).

Nothing here knows what the work is: a `Job` is opened once in each process and called with one item after another.
Results come back in the order of the items, whatever order they were made in. Nothing of Dask is imported before
`open_workers` is given workers to open.
"""
