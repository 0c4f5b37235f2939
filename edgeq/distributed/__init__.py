"""Share work among processes of this machine or of a cluster, through Dask (the extra `distributed`).

This package does not know what the work is. A `Job` is opened once in each process and called with one item after
another. Results arrive in the order of the items, whatever order they finish in. Dask is imported only when
`open_workers` has workers to open.
"""
